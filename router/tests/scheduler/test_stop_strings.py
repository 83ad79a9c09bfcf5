import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.scheduler.stop_strings import StopStrings


def stream(pieces: list[str], stops: tuple[str, ...]) -> str | None:
    """The text up to the end of the first stop string; None if there is none."""
    search = StopStrings(stops)
    text = ""
    for piece in pieces:
        match = search.search(piece)
        if match is not None:
            assert (text + piece[: match.end]).endswith(match.stop_string)
            return text + piece[: match.end]
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


@given(
    st.lists(st.text("ab", max_size=5)), st.lists(st.text("ab", min_size=1, max_size=6), max_size=3)
)
def test_unfinished_is_what_can_still_become_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    search, text = StopStrings(tuple(stops)), ""
    for piece in pieces:
        text += piece
        if (match := search.search(piece)) is not None:
            # The longest one that ends there.
            end = len(text) - len(piece) + match.end
            ending = [stop for stop in stops if text[:end].endswith(stop)]
            assert match.stop_string == max(ending, key=len)
            return
        beginnings = {stop[:num] for stop in stops for num in range(1, len(stop))}
        lengths = [len(start) for start in beginnings if text.endswith(start)]
        assert search.num_unfinished == max(lengths, default=0)


def test_nothing_is_kept_of_a_text_that_begins_no_stop_string() -> None:
    search = StopStrings(("abc", "de"))
    for _ in range(1000):
        assert search.search("x" * 50) is None
    assert search.num_unfinished == 0 and search._unfinished == ""
