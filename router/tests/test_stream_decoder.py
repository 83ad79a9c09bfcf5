from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.stream_decoder import StreamDecoder

# Pieces of characters of every length, and bytes that are never part of one.
_BYTES = st.sampled_from(
    [
        b"a",
        b"\xc3",
        b"\xa9",
        b"\xe2\x82",
        b"\xac",
        b"\xf0",
        b"\x9f\x98",
        b"\x80",
        b"\xff",
        b"\xed\xa0",
    ]
)


def steps(tokens: list[bytes]) -> list[str]:
    decoder = StreamDecoder(tokens.__getitem__)
    return [*map(decoder.step, range(len(tokens))), decoder.flush()]


def test_a_character_appears_with_its_last_byte() -> None:
    assert steps([b"\xf0", b"\x9f", b"\x98", b"\x80", b"!"]) == ["", "", "", "😀", "!", ""]
    assert steps([b"a\xe2", b"\x82\xacb\xc3", b"\xa9"]) == ["a", "€b", "é", ""]


def test_an_incomplete_character_is_shown_at_the_end() -> None:
    assert steps([b"a", b"\xe2\x82"]) == ["a", "", "�"]


def test_what_can_be_no_character_is_shown_at_once() -> None:
    assert steps([b"\xff", b"a"]) == ["�", "a", ""]
    assert steps([b"\xe2\x82", b"a"]) == ["", "�a", ""]


def test_a_real_replacement_character_does_not_stall() -> None:
    assert steps(["�".encode()] * 9) == ["�"] * 9 + [""]


def test_flush_begins_anew() -> None:
    decoder = StreamDecoder([b"\xe2\x82", b"\xac"].__getitem__)
    assert [decoder.step(0), decoder.flush(), decoder.step(1), decoder.flush()] == [
        "",
        "�",
        "�",
        "",
    ]


@given(st.lists(_BYTES | st.binary(max_size=4), max_size=30))
def test_nothing_is_lost_and_nothing_is_broken(tokens: list[bytes]) -> None:
    texts = steps(tokens)
    assert "".join(texts) == b"".join(tokens).decode(errors="replace")
    if b"".join(tokens).decode(errors="ignore").encode() == b"".join(tokens):
        assert "�" not in "".join(texts) or "�".encode() in b"".join(tokens)


@given(st.text())
def test_text_cut_anywhere_is_never_shown_broken(text: str) -> None:
    tokens = [bytes([byte]) for byte in text.encode()]
    shown = ""
    for piece in steps(tokens):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


@given(st.lists(_BYTES | st.binary(max_size=4), max_size=9))
def test_it_knows_when_it_is_inside_a_character(tokens: list[bytes]) -> None:
    decoder = StreamDecoder(tokens.__getitem__)
    for place in range(len(tokens)):
        decoder.step(place)
    is_inside = decoder.is_inside_character
    assert is_inside == bool(decoder.flush())
    assert not decoder.is_inside_character
