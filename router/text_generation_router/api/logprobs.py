"""Log-probabilities of the tokens that spell a text, in OpenAI's two shapes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from text_generation_router.api.answers import float32
from text_generation_router.chat.parser import ChatEvent, ContentDelta, ReasoningDelta
from text_generation_router.chat.service import ChatStep
from text_generation_router.request import PrefillOutput, Token
from text_generation_router.text.tokenizer import Tokenizer

Json = dict[str, Any]
# What OpenAI writes for a token that has next to no probability.
_LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, the text it added (empty inside a character), and the best tokens of its step."""

    text: str
    token: Token
    top_tokens: tuple[Token, ...]


class TokenTrail:
    """Finds the tokens of a text that is shown in pieces, later than the tokens came.

    Owns the tokens that are not shown yet. Tokens whose text is never shown (markers, stop strings,
    the end-of-sequence token) are left out.
    """

    def __init__(self, shows_special_tokens: bool = False) -> None:
        self._shows_special_tokens = shows_special_tokens
        # A token whose text has been shown in part is None, with the rest of the text.
        self._pending: list[tuple[str, ScoredToken | None]] = []
        # Between what was passed over and what is shown next may stand a marker.
        self._has_passed = False

    def add(self, token: Token, top_tokens: tuple[Token, ...]) -> None:
        """The next token of the model."""
        if self._shows_special_tokens or not token.special:
            self._pending.append((token.text, ScoredToken(token.text, token, top_tokens)))

    def take(self, text: str) -> list[ScoredToken]:
        """The tokens of the next piece that is shown; each token is taken once."""
        pending = "".join(piece for piece, _ in self._pending)
        # The text may occur in a marker before it, and is shown as soon as it is there.
        start = max(0, pending.rfind(text) if self._has_passed else pending.find(text))
        self._has_passed = False
        end = start + len(text)
        taken: list[ScoredToken] = []
        rest: list[tuple[str, ScoredToken | None]] = []
        position = 0
        for piece, scored in self._pending:
            after = position + len(piece)
            if position >= end:
                rest.append((piece, scored))
            elif (after > start or position >= start) and scored is not None:
                taken.append(scored)
            if position < end < after:
                rest.append((piece[end - position :], None))
            position = after
        self._pending = rest
        return taken

    def pass_over(self, text: str) -> None:
        """The next piece is shown without its tokens."""
        self.take(text)
        self._has_passed = True


def scored_events(
    step: ChatStep, trail: TokenTrail, is_asked: object
) -> Iterator[tuple[ChatEvent, Sequence[ScoredToken]]]:
    """The events of a step, those with content with the tokens that spell it, if that is asked."""
    for output in step.outputs if is_asked else ():
        trail.add(output.token, output.top_tokens)
    for event in step.events:
        tokens: Sequence[ScoredToken] = ()
        if is_asked and isinstance(event, ContentDelta):
            tokens = trail.take(event.text)
        elif is_asked and isinstance(event, ReasoningDelta):
            trail.pass_over(event.text)
        yield event, tokens


def chat_logprobs(
    tokens: Sequence[ScoredToken], num_top: int, tokenizer: Tokenizer, as_ids: bool = False
) -> Json:
    """The `logprobs` object of a choice of /v1/chat/completions. `as_ids`: see `_id_name`."""
    return {
        "content": [
            {
                **_chat_token(scored.token, tokenizer, as_ids),
                "top_logprobs": [
                    _chat_token(top, tokenizer, as_ids) for top in scored.top_tokens[:num_top]
                ],
            }
            for scored in tokens
        ],
        "refusal": None,
    }


def _id_name(token: Token) -> str:
    """A token as vLLM writes it where texts would be ambiguous."""
    return f"token_id:{token.id}"


def _chat_token(token: Token, tokenizer: Tokenizer, as_ids: bool) -> Json:
    spelled = tokenizer.token_bytes(token.id)
    return {
        "token": _id_name(token) if as_ids else spelled.decode(errors="replace"),
        "logprob": _number(token),
        "bytes": list(spelled),
    }


def completion_logprobs(
    prompt: Sequence[ScoredToken],
    answer: Sequence[ScoredToken],
    num_top: int,
    tokenizer: Tokenizer,
    offset: int,
    as_ids: bool = False,
) -> Json:
    """The `logprobs` object of a choice of /v1/completions.

    `offset` is where the first token is in the text. The very first token of a prompt, which
    nothing precedes, has no log-probability and no top tokens. `as_ids`: see `_id_name`.
    """

    def name(token: Token) -> str:
        return _id_name(token) if as_ids else _name(token, tokenizer)

    scored = [*prompt, *answer]
    offsets: list[int] = []
    for one in scored:
        offsets.append(offset)
        offset += len(one.text)
    tops = [None if one.token.logprob is None else _top(one, num_top, name) for one in scored]
    return {
        "tokens": [name(one.token) for one in scored],
        "token_logprobs": [
            None if one.token.logprob is None else _number(one.token) for one in scored
        ],
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }


def _top(scored: ScoredToken, num_top: int, name: Callable[[Token], str]) -> Json:
    """The best tokens and the one that was taken, which may be one more."""
    best = {name(top): _number(top) for top in scored.top_tokens[:num_top]}
    return best | {name(scored.token): _number(scored.token)}


def _name(token: Token, tokenizer: Tokenizer) -> str:
    """The text of a token; part of a character as OpenAI writes it, or all parts would be one."""
    spelled = tokenizer.token_bytes(token.id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _number(token: Token) -> float:
    number = float32(token.logprob)
    return _LOWEST if number is None else number


def prompt_logprobs(prompt: PrefillOutput, num_top: int) -> list[Json | None]:
    """By token of the prompt: its own log-probability and those of the best, by their ids; null for
    the first, which nothing precedes."""
    places: list[Json | None] = []
    for place, token in enumerate(prompt.tokens):
        if place == 0:
            places.append(None)
            continue
        best = prompt.top_tokens[place][:num_top] if prompt.top_tokens else ()
        rank = prompt.ranks[place] if place < len(prompt.ranks) else None
        found: Json = {}
        # The token itself comes first, also where it is one of the best.
        for one, at in ((token, rank), *zip(best, range(1, num_top + 1), strict=False)):
            named = {"logprob": _number(one), "rank": at, "decoded_token": one.text}
            found.setdefault(str(one.id), named)
        places.append(found)
    return places
