"""What is asked: lines of a file, or random words that make about so many tokens."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
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
    """So many words; two calls do not begin alike, so that no prefix cache helps."""
    return " ".join(chooser.choices(_WORDS, k=count))


@dataclass(frozen=True, slots=True)
class Length:
    """How many tokens so many words make: so many each, and some that come with every prompt."""

    tokens_per_word: float = 1.3
    fixed_tokens: float = 0.0

    @classmethod
    def of(cls, first: tuple[int, int], second: tuple[int, int]) -> "Length":
        """The line through two measured (words, tokens); one is enough if the words are alike."""
        (words, tokens), (more_words, more_tokens) = sorted((first, second))
        # Close together, the words' own difference would decide the slope.
        if more_words - words >= 16 and more_tokens > tokens:
            slope = (more_tokens - tokens) / (more_words - words)
            return cls(slope, max(0.0, tokens - slope * words))
        return cls(max(more_tokens, 1) / more_words)

    def words(self, tokens: int) -> int:
        """At least one word."""
        return max(1, round((tokens - self.fixed_tokens) / self.tokens_per_word))


def random_prompts(chooser: random.Random, num_words: int) -> Iterator[str]:
    """Without an end."""
    while True:
        yield random_words(chooser, num_words)


def file_prompts(prompts: Sequence[str]) -> Iterator[str]:
    """In their order, and then again from the first."""
    return cycle(prompts)


def read_prompts(path: Path) -> list[str]:
    """Each line of a text file, or `prompt` of each line of a .jsonl. Raises BenchmarkError and
    OSError."""
    try:
        # Not splitlines(): JSON may hold U+2028 as it is.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BenchmarkError(f"--prompts {path} is no UTF-8 text: {error}") from error
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
        raise BenchmarkError(f"--prompts {path} has no prompts: write one on each line")
    return prompts


def _prompt_of(line: str) -> str:
    value = orjson.loads(line)
    prompt = value if isinstance(value, str) else value["prompt"]
    if not isinstance(prompt, str):
        raise TypeError
    return prompt
