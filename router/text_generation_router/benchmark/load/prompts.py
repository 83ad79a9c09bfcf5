"""Prompts: lines of a file, or random words of an approximate number of tokens."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from text_generation_router.benchmark.measure import BenchmarkError

# Common words: one token each in the vocabularies of most models.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
)
_WORDS = _TEXT.split()


def random_words(chooser: random.Random, count: int) -> str:
    """Random words: no two prompts have a prefix in common that a prefix cache could use."""
    return " ".join(chooser.choices(_WORDS, k=count))


@dataclass(frozen=True, slots=True)
class Length:
    """Converts words to tokens: tokens per word, plus a fixed number per prompt."""

    tokens_per_word: float = 1.3
    fixed_tokens: float = 0.0

    @classmethod
    def of(cls, first: tuple[int, int], second: tuple[int, int]) -> "Length":
        """The line through two measured (words, tokens); uses the longer one if they are close."""
        (words, tokens), (more_words, more_tokens) = sorted((first, second))
        # If they are close, the difference between words dominates the slope.
        if more_words - words >= 16 and more_tokens > tokens:
            slope = (more_tokens - tokens) / (more_words - words)
            return cls(slope, max(0.0, tokens - slope * words))
        return cls(max(more_tokens, 1) / more_words)

    def words(self, tokens: int) -> int:
        """The number of words for a number of tokens, at least one."""
        return max(1, round((tokens - self.fixed_tokens) / self.tokens_per_word))


def random_prompts(chooser: random.Random, num_words: int) -> Iterator[str]:
    """An infinite sequence of prompts."""
    while True:
        yield random_words(chooser, num_words)


def read_prompts(path: Path) -> list[str]:
    """The lines of a text file, or `prompt` of each in a .jsonl. Raises BenchmarkError, OSError."""
    try:
        # Not splitlines(): JSON strings may contain U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BenchmarkError(f"--prompts {path} is not UTF-8 text: {error}") from error
    read: Callable[[str], str] = _prompt_of if path.suffix == ".jsonl" else str
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(read(line))
        except (ValueError, TypeError, KeyError) as error:
            raise BenchmarkError(
                f"--prompts {path}, line {number}: each line of a .jsonl must be a string or "
                'an object with a string as "prompt"'
            ) from error
    if not prompts:
        raise BenchmarkError(f"--prompts {path} has no prompts: write one per line")
    return prompts


def _prompt_of(line: str) -> str:
    value = orjson.loads(line)
    prompt = value if isinstance(value, str) else value["prompt"]
    if not isinstance(prompt, str):
        raise TypeError
    return prompt
