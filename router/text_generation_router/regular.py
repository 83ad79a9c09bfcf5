"""Regular expressions as people write them (Python, JavaScript, PCRE), as llguidance reads them.

Its syntax is Rust's: what is only spelt differently there is written as it is read, and what would
be read as something else is refused. All else it refuses itself.
"""

import re

# What stands for itself and must not be looked into: an escape, or a class of characters.
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
    """A regular expression can not be followed as it is meant; a reason for its user."""


def rust(source: str) -> str:
    """The same expression in Rust's syntax. Raises RegularError."""
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
