"""What a model's tokenizer says about its ids: which have a token, and which ends a text."""

from collections.abc import Sequence, Set
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from text_generation_shard.checkpoint.fields import read_json


class Vocabulary(NamedTuple):
    """The ids in tokenizer.json; and the id of the `eos_token` that the files beside it name."""

    ids: Set[int]
    end_id: int | None


def read_vocabulary(directory: Path) -> Vocabulary:
    """The model's vocabulary; empty without a tokenizer.json. ModelError if a file is not JSON; the
    router, which tokenizes, reports what else is wrong with it."""
    if not (directory / "tokenizer.json").is_file():
        return Vocabulary(frozenset(), None)
    tokenizer = read_json(directory / "tokenizer.json")
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    tokens = model.get("vocab") if isinstance(model, dict) else None
    # A unigram model lists its tokens with their scores.
    ids = dict(tokens) if isinstance(tokens, dict) else {}
    ids |= {index: index for index in range(len(tokens) if isinstance(tokens, list) else 0)}
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            ids[token["content"]] = token.get("id")
    end_id = ids.get(_end_token(directory))
    used = {token_id for token_id in ids.values() if isinstance(token_id, int)}
    return Vocabulary(used, end_id if isinstance(end_id, int) else None)


def _end_token(directory: Path) -> str | None:
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            settings |= read_json(directory / name)
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def unused_ids(used: Set[int], vocab_size: int) -> tuple[slice, ...]:
    """The ids below `vocab_size` that are not in `used`, each run of them as one slice."""
    unused: Sequence[int] = sorted(frozenset(range(vocab_size)) - used)
    # Consecutive ids have the same distance from their places.
    runs = groupby(enumerate(unused), lambda item: item[1] - item[0])
    groups = [[token_id for _, token_id in run] for _, run in runs]
    return tuple(slice(group[0], group[-1] + 1) for group in groups)
