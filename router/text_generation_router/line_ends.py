"""Lines of JSON that every reader of lines takes as one line each."""

_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029"]


def without_line_ends(lines: bytes) -> bytes:
    """The same JSON, with the characters escaped that end lines for `str.splitlines` and for
    clients that read as it does. orjson escapes the others, which are ASCII."""
    if lines.isascii():
        return lines
    for character, escaped in _LINE_ENDS:
        lines = lines.replace(character, escaped)
    return lines
