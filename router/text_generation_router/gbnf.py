"""Translates GBNF, llama.cpp's form of EBNF that vLLM's clients send, to llguidance's Lark."""

from llguidance.gbnf_to_lark import gbnf_to_lark

from text_generation_router.errors import GrammarError

# The translation takes time in proportion to the product of both. It is Python code: other threads
# run at half speed meanwhile.
MAX_RULES, MAX_BYTES = 256, 16_384
_SHOWN_CHARACTERS = 200


def lark_of_gbnf(source: str) -> str:
    """The grammar in Lark. Raises GrammarError if it is not valid, or too large."""
    count, size = source.count("::="), len(source.encode())
    if count > MAX_RULES or size > MAX_BYTES:
        raise GrammarError(
            f"grammar is too large: GBNF may have at most {MAX_RULES} rules and {MAX_BYTES} "
            f"bytes; write it in Lark. Given: {count} rules and {size} bytes"
        )
    try:
        return gbnf_to_lark(source)
    except RecursionError as error:
        raise GrammarError("grammar is too large: nest its rules less") from error
    except Exception as error:  # the library raises `Exception` itself
        reason = str(error)[:_SHOWN_CHARACTERS]
        raise GrammarError(f"grammar is not valid: not GBNF: {reason}") from error
