"""Grammars in GBNF, llama.cpp's form of EBNF, which vLLM's clients send, in llguidance's Lark."""

from llguidance.gbnf_to_lark import gbnf_to_lark

from text_generation_router.errors import GrammarError

_SHOWN_CHARACTERS = 200


def lark_of_gbnf(source: str) -> str:
    """The same grammar in Lark. Raises GrammarError where it is none."""
    try:
        return gbnf_to_lark(source)
    except RecursionError as error:
        raise GrammarError("grammar is too large: nest its rules less") from error
    except Exception as error:  # the library raises `Exception` itself
        told = str(error)[:_SHOWN_CHARACTERS]
        raise GrammarError(f"grammar is not valid: not GBNF: {told}") from error
