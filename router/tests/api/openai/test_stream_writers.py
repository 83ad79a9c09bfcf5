"""What is written from templates is what JSON would be."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from text_generation_router.api.answers import event, float32
from text_generation_router.api.tgi.generate import token_events
from text_generation_router.request import Token, TokenOutput
from text_generation_router.scheduler.entry import Entry
from text_generation_router.validation import GenerateParameters

from router.tests.scheduling import make_request, make_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9) | st.sampled_from(
    ['"', "\\", "\n\u2028", "%s", "€"]
)
TOKENS = st.builds(
    Token,
    st.integers(0, 2**31),
    TEXTS,
    st.none() | st.floats(-90, 0, width=32),
    st.booleans(),
)


def token_json(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "text": token.text,
        "logprob": float32(token.logprob),
        "special": token.special,
    }


@given(st.lists(st.tuples(TOKENS, st.lists(TOKENS, max_size=2)), min_size=1, max_size=5))
def test_token_events(steps: list[tuple[Token, list[Token]]]) -> None:
    asked = GenerateParameters(inputs="x")
    expected = []
    for place, (token, top_tokens) in enumerate(steps, start=1):
        payload: dict[str, Any] = {"index": place, "token": token_json(token)}
        if top_tokens:
            payload["top_tokens"] = [token_json(top) for top in top_tokens]
        expected.append(event(payload | {"generated_text": None, "details": None}))
    outputs = [TokenOutput(token, "", tuple(top_tokens)) for token, top_tokens in steps]
    middle = len(outputs) // 2
    parts = (outputs[:middle], 0), (outputs[middle:], middle)
    chunks = [token_events(some, num_before, asked, 1) for some, num_before in parts]
    assert b"".join(chunks) == b"".join(expected)


async def test_outputs_of_a_reader_that_is_cancelled_are_kept() -> None:
    request = make_request((0,), 9)
    entry = Entry(0, request, make_tokenizer())
    reading = asyncio.create_task(anext(entry))
    await asyncio.sleep(0)
    reading.cancel()
    output = TokenOutput(Token(1, "a", -0.5))
    entry.deliver([output])
    await asyncio.wait({reading})
    assert await anext(entry) == [output]
