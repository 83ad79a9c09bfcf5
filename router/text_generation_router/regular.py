"""Translates regular expressions (Python, JavaScript, PCRE) to the syntax of Rust, for llguidance.

Syntax that Rust spells differently is rewritten. Syntax that Rust would read with another meaning
is refused here; llguidance refuses the rest itself.
"""

import re

# One piece of an expression. Escapes and character classes are whole pieces.
_PIECE = re.compile(
    r"""(?P<comment>\(\?\#[^)]*\))
    |(?P<refused>\(\?>|\(\?P=|\\k[<{]|\(\?\()
    |(?P<end>\\Z)
    |(?P<most>\{,(?=\d+\}))
    |(?P<possessive>(?:[*+?]|\{\d+(?:,\d*)?\})\+)
    |(?P<class>\[\^?\]?(?:\\.|\[\^?(?:\\.|[^\\\]])*\]|[^\\\]\[])*\])
    |(?P<unclosed>(?:\[|\(\?\#).*)
    |(?P<other>\\.|.)""",
    re.X | re.S,
)
_REFUSED = {
    "(?>": "atomic groups are not supported; write `(?:…)`",
    "(?P": "backreferences are not supported",
    "\\k": "backreferences are not supported",
    "(?(": "conditions are not supported",
}


class RegularError(ValueError):
    """A regular expression that is not supported; the message is a reason for the client."""


def rust(source: str) -> str:
    """The expression in Rust's syntax. Raises RegularError."""
    return _PIECE.sub(_written, source)


def _written(found: re.Match[str]) -> str:
    kind, text = found.lastgroup, found[0]
    if kind == "refused":
        raise RegularError(_REFUSED.get(text[:3]) or _REFUSED[text[:2]])
    if kind == "possessive":
        raise RegularError(
            f"possessive repetitions are not supported; write `{text[:-1]}` in place of `{text}`"
        )
    return {"comment": "", "end": r"\z", "most": "{0,"}.get(str(kind), text)
