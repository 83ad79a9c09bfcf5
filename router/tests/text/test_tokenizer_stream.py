import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.text.tokenizer import StreamDecoder

# Pieces of characters of every length, and bytes that are never part of one.
_PIECES = (b"a", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0", b"\x9f\x98", b"\x80", b"\xff")
_BYTES = st.sampled_from([*_PIECES, b"\xed\xa0"])


def steps(tokens: list[bytes]) -> list[str]:
    decoder = StreamDecoder(tokens.__getitem__)
    return [*map(decoder.step, range(len(tokens))), decoder.flush()]


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ([b"\xf0", b"\x9f", b"\x98", b"\x80", b"!"], ["", "", "", "😀", "!", ""]),
        ([b"a\xe2", b"\x82\xacb\xc3", b"\xa9"], ["a", "€b", "é", ""]),
        ([b"a", b"\xe2\x82"], ["a", "", "�"]),
        ([b"\xff", b"a"], ["�", "a", ""]),
        ([b"\xe2\x82", b"a"], ["", "�a", ""]),
        (["�".encode()] * 2, ["�", "�", ""]),
    ],
)
def test_a_character_appears_with_its_last_byte(tokens: list[bytes], texts: list[str]) -> None:
    """Bytes that can not become one appear as U+FFFD at once, or at the end."""
    assert steps(tokens) == texts


@given(st.lists(_BYTES | st.binary(max_size=4), max_size=30))
def test_nothing_is_lost_and_nothing_is_broken(tokens: list[bytes]) -> None:
    texts = steps(tokens)
    assert "".join(texts) == b"".join(tokens).decode(errors="replace")
    if b"".join(tokens).decode(errors="ignore").encode() == b"".join(tokens):
        assert "�" not in "".join(texts) or "�".encode() in b"".join(tokens)


@given(st.lists(_BYTES | st.binary(max_size=4), max_size=9))
def test_it_knows_when_it_is_inside_a_character(tokens: list[bytes]) -> None:
    decoder = StreamDecoder(tokens.__getitem__)
    for place in range(len(tokens)):
        decoder.step(place)
    is_inside = decoder.is_inside_character
    assert is_inside == bool(decoder.flush())
    assert not decoder.is_inside_character
