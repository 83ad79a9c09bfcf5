"""A grammar in llguidance's form as an expression."""

import json
from collections.abc import Callable

from text_generation_shard.grammars.language.expressions import Expression
from text_generation_shard.grammars.language.lark import lark_expression
from text_generation_shard.grammars.language.schema import schema_expression


def grammar_expression(text: str, special: Callable[[str], int | None]) -> Expression | None:
    """The texts of a grammar; None: there is something in it that is not read here.

    `special` knows the tokens that are no text.
    """
    try:
        if not text.lstrip().startswith("{"):
            return lark_expression(text, special)
        [grammar] = json.loads(text)["grammars"]
        if "json_schema" in grammar:
            return schema_expression(grammar["json_schema"])
        return lark_expression(grammar["lark_grammar"], special)
    # What llguidance says about a grammar that is none is told by it, not here.
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return None
