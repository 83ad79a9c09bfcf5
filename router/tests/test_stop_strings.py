import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.scheduler.stop_strings import StopStrings


def stream(pieces: list[str], stops: tuple[str, ...]) -> str | None:
    """The text up to the end of the first stop string; None if there is none."""
    search = StopStrings(stops)
    text = ""
    for piece in pieces:
        cut = search.search(piece)
        if cut is not None:
            return text + piece[:cut]
        text += piece
    return None


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["abc"], (), None),
        (["abc"], ("d",), None),
        (["abc"], ("c",), "abc"),
        (["abcdef"], ("c",), "abc"),
        (["a", "b", "c", "d"], ("bc",), "abc"),
        (["xa", "", "ab", "bc"], ("aabb",), "xaabb"),
        (["aaa"], ("aa",), "aa"),
        (["a", "aa"], ("aa",), "aa"),
        # The one that ends first, not the one that begins first or is named first.
        (["abcdef"], ("abcde", "cd"), "abcd"),
        (["abcdef"], ("f", "b"), "ab"),
        (["abcd", "ef"], ("bcde", "d"), "abcd"),
        # The tail that is kept is as long as the longest stop string needs.
        (["a", "b", "c", "d", "e"], ("abcde", "x"), "abcde"),
        (["y\n", "\nz"], ("\n\n",), "y\n\n"),
        (["é", "€😀"], ("€",), "é€"),
        (["abc"], ("",), ""),
    ],
)
def test_table(pieces: list[str], stops: tuple[str, ...], text: str | None) -> None:
    assert stream(pieces, stops) == text


@given(
    st.lists(st.text("ab", max_size=5)), st.lists(st.text("ab", min_size=1, max_size=6), max_size=3)
)
def test_the_pieces_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    assert stream(pieces, tuple(stops)) == (text[: ends[0]] if ends else None)


def test_only_a_bounded_tail_is_kept() -> None:
    search = StopStrings(("abc", "de"))
    for _ in range(1000):
        assert search.search("x" * 50) is None
    assert len(search._tail) == 2
