"""Tries grammars in a process that may be killed: see `text_generation_process.worker`."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

from llguidance import LLTokenizer

from text_generation_shard.grammars.grammar import Tried, try_text
from text_generation_shard.grammars.tokenizer import GrammarError, TokenizerFile

# Most processor time of a trial. Usual ones take 5 ms, 100 tools 100 ms.
_SHORT_S, _LONG_S = 0.2, 1.5
# The priority of a long trial, in favour of the model.
_NICE = 5


def prepare(arguments: bytes) -> "Trials":
    """Load the tokenizer: its path, the size of the vocabulary, the end tokens."""
    path, vocab_size, eos_ids = json.loads(arguments)
    try:
        return Trials(TokenizerFile(Path(path), vocab_size, tuple(eos_ids)).load())
    except GrammarError as error:
        return Trials(error)


class Trials:
    """The calls of the worker. They answer with the fields of `Tried`."""

    def __init__(self, tokenizer: LLTokenizer | GrammarError) -> None:
        self._tokenizer = tokenizer

    def short(self, text: bytes) -> bytes:
        """Try one grammar."""
        return self._try(text, _SHORT_S)

    def long(self, text: bytes) -> bytes:
        """Try one grammar with less priority, which this process keeps."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        return self._try(text, _LONG_S)

    def _try(self, text: bytes, most_s: float) -> bytes:
        if isinstance(self._tokenizer, GrammarError):
            tried = Tried(str(self._tokenizer))
        else:
            signal.setitimer(signal.ITIMER_PROF, most_s)  # its default action ends the process
            tried = try_text(self._tokenizer, text.decode())
            signal.setitimer(signal.ITIMER_PROF, 0)
        return json.dumps([tried.error, tried.text, list(tried.ending)]).encode()
