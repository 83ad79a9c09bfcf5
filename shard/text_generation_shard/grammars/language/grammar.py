"""A grammar in llguidance's form as an expression."""

import json
from collections.abc import Callable

from text_generation_shard.grammars.language.expressions import Expression
from text_generation_shard.grammars.language.lark import lark_expression
from text_generation_shard.grammars.language.schema import schema_expression


def grammar_expression(text: str, special: Callable[[str], int | None]) -> Expression | None:
    """The texts of a grammar; None: the grammar uses something unsupported.

    `special`: the id of a special token by its name.
    """
    try:
        if not text.lstrip().startswith("{"):
            return lark_expression(text, special)
        [grammar] = json.loads(text)["grammars"]
        if "json_schema" in grammar:
            return schema_expression(grammar["json_schema"])
        return lark_expression(grammar["lark_grammar"], special)
    # llguidance itself reports invalid grammars.
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return None
