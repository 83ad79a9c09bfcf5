"""The `encrypted_content` of reasoning: the text in base64, not encrypted.

Nothing is stored here, and clients with `store: false` keep this field only. There is no secret in
it: the client has the same text in `content`.
"""

from base64 import b64decode, b64encode

_PREFIX = "plain1."


def write(text: str) -> str:
    """The field for a reasoning of this text."""
    return _PREFIX + b64encode(text.encode()).decode()


def read(field: str) -> str | None:
    """The text of the reasoning; None if another server wrote the field."""
    if not field.startswith(_PREFIX):
        return None
    try:
        return b64decode(field.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:
        return None
