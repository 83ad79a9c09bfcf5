"""A text never has fewer tokens than its bytes say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.token_bound import TokenBound
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from router.tests.test_tokenizer import FAST, byte_fallback, byte_level

BOUNDS = {name: TokenBound(fast, fast.get_vocab()) for name, fast in FAST.items()}
PIECES = st.sampled_from(["ça va", "\n\n  ", "<s>", "</s>", "Hello", " ", "▁", "ab", "😀", "\t"])


@given(
    text=st.lists(st.text(max_size=5) | PIECES, max_size=20).map("".join),
    name=st.sampled_from(["byte_level", "byte_fallback"]),
)
def test_a_text_has_no_fewer(text: str, name: str) -> None:
    num_tokens = len(FAST[name].encode(text, add_special_tokens=False).ids)
    assert BOUNDS[name].least_tokens(text) <= num_tokens


def test_it_says_something() -> None:
    assert BOUNDS["byte_level"].least_tokens("x" * 10_000) > 200
    assert BOUNDS["byte_fallback"].least_tokens("x" * 10_000) > 500


@pytest.mark.parametrize("name", ["metaspace", "word_piece", "no_decoder"])
def test_nothing_is_certain_where_characters_have_no_tokens(name: str) -> None:
    assert BOUNDS[name].least_tokens("x" * 10_000) == 0


def _bound(fast: FastTokenizer) -> TokenBound:
    return TokenBound(fast, fast.get_vocab())


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Strip(),
        normalizers.StripAccents(),
        normalizers.Replace("xx", "x"),
        normalizers.Replace(Regex("x+"), "x"),
        normalizers.Sequence([normalizers.Prepend("a"), normalizers.Nmt()]),
    ],
    ids=repr,
)
def test_nothing_is_certain_where_text_may_be_dropped(normalizer: normalizers.Normalizer) -> None:
    fast = byte_fallback()
    fast.normalizer = normalizer
    assert _bound(fast).least_tokens("x" * 10_000) == 0


def test_composed_characters_are_shorter() -> None:
    fast = byte_level()
    fast.normalizer = normalizers.NFC()
    assert _bound(fast).least_tokens("x" * 10_000) > 50
    assert _bound(fast).least_tokens("e\u0301" * 10_000) == 0


def test_pieces_and_spaces_that_are_dropped() -> None:
    fast = byte_level()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    assert _bound(fast).least_tokens("x" * 10_000) == 0
    fast = byte_level()
    fast.add_special_tokens([AddedToken("<m>", lstrip=True)])
    assert len(fast.encode(" " * 1000 + "<m>").ids) == 1
    assert _bound(fast).least_tokens("x" * 10_000) == 0
