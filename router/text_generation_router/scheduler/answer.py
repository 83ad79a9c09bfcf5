"""The text of one generation: token ids in, tokens with text out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from text_generation_router.request import (
    FinishReason,
    GeneratedText,
    PrefillOutput,
    Request,
    Token,
    TokenOutput,
)
from text_generation_router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A complete stop string."""

    stop_string: str
    # Its end in the last piece, in characters.
    end: int


class StopStrings:
    """Finds the first stop string that is completed, however the text is cut into pieces.

    Keeps only the end of the text that may be the beginning of a stop string: later matches begin
    there or behind it.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        # Of several that end together the longest counts: it begins first.
        self._stop_strings = sorted(stop_strings, key=len, reverse=True)
        self._unfinished = ""

    @property
    def num_unfinished(self) -> int:
        """How many characters at the end of the text may belong to a stop string."""
        return len(self._unfinished)

    def search(self, piece: str) -> StopMatch | None:
        """The stop string that `piece` completes; None without one.

        Of several, the one that ends first counts: so the result does not depend on the pieces.
        Not to be called again after a match.
        """
        if not self._stop_strings or not piece:
            return None
        text = self._unfinished + piece
        starts = ((text.find(stop), stop) for stop in self._stop_strings)
        matches = [
            StopMatch(stop, max(0, start + len(stop) - len(self._unfinished)))
            for start, stop in starts
            if start >= 0
        ]
        if matches:
            return min(matches, key=lambda match: match.end)
        begins = min(_unfinished_start(text, stop) for stop in self._stop_strings)
        self._unfinished = text[begins:]
        return None


class Answer:
    """Turns the shard's tokens into outputs and ends the text at a stop string.

    Promises: the texts of all tokens, joined, are the text of the model with special tokens, cut
    behind a stop string. The deltas, joined, are `GeneratedText.text`: the same without hidden
    special tokens and, where stop strings are left out, without the one that ended the text, of
    which no part was ever in a delta.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request, self._asked = request, request.asked
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream_decoder()
        self._stop_strings = StopStrings(self._asked.stop)
        self._is_plain = not self._asked.stop
        self._deltas: list[str] = []
        # The end of the visible text, held back because it may belong to a stop string.
        self._held = ""
        self._num_tokens = 0

    def prefill(
        self,
        logprobs: Sequence[float],
        top_tokens: tuple[Sequence[int], Sequence[float]] = ((), ()),
        ranks: Sequence[int] = (),
    ) -> PrefillOutput:
        """The prompt's tokens, with one log-probability each. Arguments: see StepResult."""
        input_ids = self._request.input_ids
        best = self._tokens(*top_tokens)
        each = len(best) // max(1, len(logprobs) - 1)
        places = range(0, len(best), each) if best else ()
        tops = tuple(best[place : place + each] for place in places)
        tokens = self._tokens(input_ids, logprobs)
        return PrefillOutput(tokens, ((), *tops) if tops else (), (None, *ranks))

    def step(
        self,
        token_id: int,
        logprob: float,
        finish_reason: FinishReason | None,
        top_tokens: tuple[Sequence[int], Sequence[float]] = ((), ()),
    ) -> TokenOutput:
        """The output for the next token; `generated` is set if it is the last.

        `finish_reason` is the shard's. Where stop strings are kept, as in TGI, it wins over a stop
        string, which still cuts the text, and length wins over an end token that is the last one
        allowed. `top_tokens`: ids and log-probabilities.
        """
        self._num_tokens += 1
        if finish_reason is None and self._is_plain and not top_tokens[0]:
            # Nearly every token: whole characters, and no stop string to look for.
            plain = self._tokenizer.plain_text(token_id)
            if plain is not None and not self._decoder.is_inside_character:
                self._deltas.append(plain)
                return TokenOutput(Token(token_id, plain, _finite(logprob)), plain)
        asked = self._asked
        is_end = finish_reason is FinishReason.EOS_TOKEN
        is_full = self._num_tokens == self._request.max_new_tokens
        if is_end and is_full and asked.keeps_stop_sequence:
            is_end, finish_reason = False, FinishReason.LENGTH
        # The text of a token that ends the answer is not shown.
        is_out = (is_end or finish_reason is FinishReason.STOP_TOKEN) and not asked.includes_stop
        special = is_end or self._tokenizer.is_special(token_id)
        if special or is_out:
            # It interrupts an incomplete character.
            visible = self._decoder.flush()
            token_text = self._tokenizer.decode_each([token_id])[0]
            text = visible + token_text
            if not is_out and self._shows(token_text):
                visible = text
        else:
            text = visible = self._decoder.step(token_id)
            if finish_reason is not None:
                text = visible = visible + self._decoder.flush()
        match = self._search(text, visible, is_out)
        if match is not None:
            text, visible = text[: match.end], visible[: match.end]
            if finish_reason is None or not asked.keeps_stop_sequence:
                finish_reason = FinishReason.STOP_SEQUENCE
        delta = self._delta(visible, match, is_last=finish_reason is not None)
        self._deltas.append(delta)
        return TokenOutput(
            Token(token_id, text, _finite(logprob), special),
            delta,
            self._tokens(*top_tokens),
            None if finish_reason is None else self._generated(finish_reason, match, token_id),
        )

    def _shows(self, special_token: str) -> bool:
        asked = self._asked
        return asked.shows_special_tokens or special_token in asked.visible_special_tokens

    def _search(self, text: str, visible: str, is_out: bool) -> StopMatch | None:
        """The stop string that a token completes.

        Where stop strings are kept, all text is searched, as in TGI; where they are left out, the
        visible text, and a hidden special token that is a stop string as a whole.
        """
        if self._num_tokens <= self._asked.num_unstopped_tokens:
            return None
        if self._asked.keeps_stop_sequence:
            return self._stop_strings.search(text)
        match = self._stop_strings.search(visible)
        hidden = text[len(visible) :]
        if match is None and hidden and not is_out:
            stops = self._asked.stop
            match = StopMatch(hidden, len(text)) if hidden in stops else None
        return match

    def _delta(self, visible: str, match: StopMatch | None, is_last: bool) -> str:
        """The part of the held text and `visible` that can be shown now."""
        asked = self._asked
        if asked.keeps_stop_sequence or asked.includes_stop:
            return visible
        shown = self._held + visible
        num_held = 0
        if match is not None:
            # No change where a hidden token was the stop string.
            shown = shown.removesuffix(match.stop_string)
        elif not is_last:
            num_held = self._stop_strings.num_unfinished
        end = len(shown) - num_held
        self._held = shown[end:]
        return shown[:end]

    def _generated(
        self, finish_reason: FinishReason, match: StopMatch | None, token_id: int
    ) -> GeneratedText:
        sampling = self._request.sampling
        return GeneratedText(
            "".join(self._deltas),
            0 if self._asked.is_prompt_only else self._num_tokens,
            finish_reason,
            sampling.seed if sampling.is_sampling else None,
            None if match is None else match.stop_string,
            token_id if finish_reason is FinishReason.STOP_TOKEN else None,
        )

    def _tokens(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[Token, ...]:
        texts = self._tokenizer.decode_each(token_ids)
        return tuple(
            Token(token_id, text, _finite(logprob), self._tokenizer.is_special(token_id))
            for token_id, text, logprob in zip(token_ids, texts, logprobs, strict=True)
        )


def _finite(logprob: float) -> float | None:
    """None in place of NaN and infinity, which JSON does not have."""
    return logprob if math.isfinite(logprob) else None


def _unfinished_start(text: str, stop: str) -> int:
    """Start of the longest end of `text` that is a beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
