"""Rows of training tokens: whole exchanges, padded with source code, and rows of source code."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy
import torch
from tokenizers import Tokenizer

from embedded_model.corpus import Entry, source_files
from embedded_model.dialogue import END_OF_TEXT, make_exchange
from embedded_model.save import token_id

TOKENS_PER_STEP = 4096
SHORT_ROW = 256
LONG_ROWS_EVERY = 16
LONG_ROWS = (1024, 2048)
"""One step in LONG_ROWS_EVERY has long rows; the other rows are short, for speed."""

SOURCE_ROW_SHARE = 0.13
"""Share of rows of source code only. With the padding of other rows, a fifth is source code."""

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids, and for each position the id to predict there, or `IGNORED`."""

    inputs: torch.Tensor
    targets: torch.Tensor


def row_length(step: int) -> int:
    """The length of a step's rows."""
    turn, rest = divmod(step, LONG_ROWS_EVERY)
    return LONG_ROWS[turn % len(LONG_ROWS)] if rest == LONG_ROWS_EVERY - 1 else SHORT_ROW


def tokenize_source(tokenizer: Tokenizer) -> list[array[int]]:
    """Each source file as ids."""
    encodings = tokenizer.encode_batch([text for _, text in source_files()])
    return [array("H", encoding.ids) for encoding in encodings]


class RowMaker:
    """An endless, seeded stream of rows of tokens."""

    def __init__(self, entries: list[Entry], tokenizer: Tokenizer, seed: int) -> None:
        self._entries = entries
        self._tokenizer = tokenizer
        self._random = Random(seed)
        self._source_random = Random(seed + 1)
        self._end_of_text = token_id(tokenizer, END_OF_TEXT)
        self._files = tokenize_source(tokenizer)
        self._source = array("H")
        self._position = 0
        self._exchanges = self._endless_exchanges()
        self._pending: tuple[list[int], list[int]] | None = None

    def _endless_exchanges(self) -> Iterator[tuple[list[int], list[int]]]:
        """The prompt's and the completion's ids, every entry once in each round."""
        entries = list(self._entries)
        while True:
            self._random.shuffle(entries)
            exchanges = [make_exchange(entry, self._random) for entry in entries]
            prompts = self._tokenizer.encode_batch([exchange.prompt for exchange in exchanges])
            answers = self._tokenizer.encode_batch([exchange.completion for exchange in exchanges])
            for prompt, answer in zip(prompts, answers, strict=True):
                yield prompt.ids, answer.ids

    def _take_source(self, count: int) -> list[int]:
        """The next `count` ids of the source files, which come in a new order each round."""
        while len(self._source) - self._position < count:
            order = list(range(len(self._files)))
            self._source_random.shuffle(order)
            rest = self._source[self._position :]
            for index in order:
                rest.extend(self._files[index])
                rest.append(self._end_of_text)
            self._source, self._position = rest, 0
        taken = self._source[self._position : self._position + count]
        self._position += count
        return taken.tolist()

    def _source_row(self, length: int) -> tuple[list[int], list[int]]:
        ids = self._take_source(length + 1)
        return ids[:-1], ids[1:]

    def row(self, length: int) -> tuple[list[int], list[int]]:
        """Inputs and targets of one row."""
        if self._random.random() < SOURCE_ROW_SHARE:
            return self._source_row(length)
        ids: list[int] = []
        learnt: list[bool] = []
        while True:
            prompt, completion = self._pending or next(self._exchanges)
            self._pending = None
            size = len(prompt) + len(completion)
            if len(ids) + size > length + 1:
                # An exchange that does not fit an empty row is dropped.
                if ids:
                    self._pending = (prompt, completion)
                break
            ids += prompt + completion
            learnt += [False] * len(prompt) + [True] * len(completion)
        filling = self._take_source(length + 1 - len(ids))
        ids += filling
        # The first padding token is not learnt: it follows the answer by chance.
        learnt += [index > 0 for index in range(len(filling))]
        targets = [
            token if use else IGNORED for token, use in zip(ids[1:], learnt[1:], strict=True)
        ]
        return ids[:-1], targets

    def batch(self, step: int) -> Batch:
        """The batch of a step; steps must be requested in order."""
        length = row_length(step)
        rows = [self.row(length) for _ in range(TOKENS_PER_STEP // length)]
        return Batch(
            torch.from_numpy(numpy.array([inputs for inputs, _ in rows], dtype=numpy.int64)),
            torch.from_numpy(numpy.array([targets for _, targets in rows], dtype=numpy.int64)),
        )
