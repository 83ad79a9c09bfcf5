"""Which tokens spell a text."""

import random

from text_generation_router.api.logprobs import TokenTrail
from text_generation_router.request import Token


def token(text: str, place: int = 0, special: bool = False) -> Token:
    return Token(place, text, -1.0, special)


def texts(trail: TokenTrail, text: str) -> list[str]:
    return [scored.text for scored in trail.take(text)]


def test_tokens_of_a_piece_come_with_its_beginning() -> None:
    trail = TokenTrail()
    trail.add(token("hello"), ())
    trail.add(token(" world"), ())
    assert texts(trail, "hel") == ["hello"]
    assert texts(trail, "lo wo") == [" world"]
    assert texts(trail, "rld") == []


def test_hidden_tokens_have_no_logprobs() -> None:
    trail = TokenTrail()
    for text in ("<think>", "hm", "</think>", "\n\n", "a", "", "é", "STOP"):
        trail.add(token(text), ())
    trail.add(token("</s>", special=True), ())
    assert texts(trail, "aé") == ["a", "", "é"]


def test_any_cut_of_the_text_takes_every_token_once() -> None:
    draw = random.Random(3)
    for _ in range(200):
        pieces = ["".join(draw.choices("abé", k=draw.randrange(4))) for _ in range(8)] + ["z"]
        text = "".join(pieces)
        trail = TokenTrail()
        for place, piece in enumerate(pieces):
            trail.add(token(piece, place), ())
        cuts = sorted(draw.sample(range(len(text) + 1), k=min(3, len(text))))
        taken = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            if start < end:
                taken += [scored.token.id for scored in trail.take(text[start:end])]
        assert taken == list(range(len(pieces)))
