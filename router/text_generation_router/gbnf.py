"""Grammars in GBNF, llama.cpp's form of EBNF, which vLLM's clients send, in llguidance's Lark."""

from llguidance.gbnf_to_lark import gbnf_to_lark

from text_generation_router.errors import GrammarError

# The time of a translation grows by the product of both, up to half a second; it is Python's, so
# that other threads run half as fast meanwhile.
MAX_RULES, MAX_BYTES = 256, 16_384
_SHOWN_CHARACTERS = 200


def lark_of_gbnf(source: str) -> str:
    """The same grammar in Lark. Raises GrammarError where it is none, or too large."""
    count, size = source.count("::="), len(source.encode())
    if count > MAX_RULES or size > MAX_BYTES:
        raise GrammarError(
            f"grammar is too large: in GBNF it must have at most {MAX_RULES} rules and {MAX_BYTES} "
            f"bytes; write it in Lark. Given: {count} rules and {size} bytes"
        )
    try:
        return gbnf_to_lark(source)
    except RecursionError as error:
        raise GrammarError("grammar is too large: nest its rules less") from error
    except Exception as error:  # the library raises `Exception` itself
        told = str(error)[:_SHOWN_CHARACTERS]
        raise GrammarError(f"grammar is not valid: not GBNF: {told}") from error
