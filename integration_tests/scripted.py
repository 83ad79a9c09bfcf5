"""Checkpoints of models that write a given text: test doubles for chats, tools and streams.

`write_scripted("qwen3", directory, {"": "Hello.", "ask:call": "<tool_call>\\n{…}\\n</tool_call>"})`
writes a Hugging Face directory. The model answers with the script of the trigger that comes last in
its prompt, and with the script of "" if there is none, and ends. A trigger is any text; it becomes
an added token. Added tokens in a script (`<think>`) are written as these tokens; all other text is
cut into pieces that are tokens of their own.

The model is one layer of a Llama, and its weights are a table:

- The embedding of a token is a number of its own, if it is in a script, and a constant.
- Head 0 looks at the last token but one, head 1 at the last but two, head 2 at the last trigger.
- `lm_head` adds what speaks for a token: it is in the trigger's script, it follows the last token
  and the tokens before it, it is the first or second of its script.

All other tokens have logits so much lower that sampling with temperature 1 gives the same text.
Serve it with `--dtype float32`.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tokenizers import Tokenizer

from integration_tests.published import PUBLISHED, spelled, tokenizer_of, write_tokenizer

if TYPE_CHECKING:
    import torch

# What speaks for a token. A last token with which a prompt may end says little.
_CHOSEN, _FOLLOWS, _FOLLOWS_EARLIER, _FIRST, _SECOND, _FOLLOWS_COMMON = 64, 8, 8, 4, 2, 1
# The logits are multiplied by this.
_SHARPNESS = 20.0
_HEAD_DIM, _THETA = 64, 70_000.0
_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": 32768,
    "rope_theta": _THETA,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
# The size of the queries: large enough that each head looks at one token.
_NEAR, _RECENT = 800.0, 3e6
# Heads 0 and 1 use the first pairs of rotated dimensions, head 2 the last, which turns slowest.
_NEAR_PAIRS, _RECENT_PAIR = 16, _HEAD_DIM // 2 - 1
_SHORTEST_PIECE = 3


def write_scripted(name: str, directory: Path, scripts: Mapping[str, str]) -> Path:
    """Writes a model with PUBLISHED[name]'s tokenizer into the directory, which it returns.

    `scripts` has one for "", and none is empty. A prompt must not end with a word of a script.
    Raises ValueError if two tokens may follow a place of a script.
    """
    directory.mkdir(parents=True, exist_ok=True)
    published = PUBLISHED[name]
    added = [*published.special, *published.plain]
    pieces = _Pieces(tokenizer_of(name), added)
    cut = {trigger: [*pieces.cut(text), published.eos] for trigger, text in scripts.items()}
    own = [trigger for trigger in scripts if trigger and trigger not in added]
    tokenizer = tokenizer_of(name, pieces=pieces.made, plain=own)

    def ids(texts: Sequence[str]) -> list[int]:
        vocabulary = tokenizer.get_vocab()
        return [vocabulary[text] if text in added else vocabulary[spelled(text)] for text in texts]

    # A prompt may end with a token of whitespace.
    own_ids = ids([piece for piece in chain(*cut.values()) if not piece.isspace()])
    table = _Table({trigger: ids(script) for trigger, script in cut.items()}, set(own_ids))
    triggers = [tokenizer.token_to_id(trigger) for trigger in scripts if trigger]
    table.check()
    columns = _Columns.of(table, triggers)
    write_tokenizer(name, directory, tokenizer)
    _write_weights(directory, table, columns, tokenizer.get_vocab_size())
    config = _CONFIG | {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": columns.count,
        "eos_token_id": tokenizer.token_to_id(published.eos),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": config["eos_token_id"]})
    )
    return directory


class _Pieces:
    """Cuts scripts into pieces that are not in the vocabulary and of which no two are equal, as
    far as that is possible."""

    def __init__(self, tokenizer: Tokenizer, added: Sequence[str]) -> None:
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._vocabulary = tokenizer.get_vocab()
        self.made: list[str] = []

    def cut(self, text: str) -> list[str]:
        """The pieces and added tokens of a script."""
        found: list[str] = []
        for place, part in enumerate(self._added.split(text)):
            found += [part] if place % 2 else self._cut_plain(part)
        return found

    def _cut_plain(self, text: str) -> list[str]:
        found: list[str] = []
        start = 0
        while start < len(text):
            end = start + _SHORTEST_PIECE
            # Up to whitespace: in a word a grammar may leave one way, which is the tokenizer's own.
            while end < len(text) and not (
                text[end].isspace() and self._is_new(text[start:end], found)
            ):
                end += 1
            found.append(text[start:end])
            start = end
        # The last piece had no more text to become a new one.
        while len(found) > 1 and not self._is_new(found[-1], found[:-1]):
            found[-2:] = [found[-2] + found[-1]]
        self.made += [piece for piece in found if self._is_new(piece, [])]
        return found

    def _is_new(self, piece: str, others: Sequence[str]) -> bool:
        return not (piece in self.made or piece in others or spelled(piece) in self._vocabulary)


class _Table:
    """What speaks for each token, after each token of the scripts."""

    def __init__(self, scripts: Mapping[str, Sequence[int]], own: set[int]) -> None:
        """`own`: ids with which no prompt ends, unless an answer begins with them."""
        self.scripts = scripts
        self._own = own
        # Tokens that may follow. Where that is not enough, also those that follow an earlier
        # token: the last but one, or the last but two, as a prompt may end with the last but one.
        self.after: defaultdict[int, set[int]] = defaultdict(set)
        self.after_earlier: tuple[defaultdict[int, set[int]], ...] = (
            defaultdict(set),
            defaultdict(set),
        )
        for script in scripts.values():
            for last, following in pairwise(script):
                self.after[last].add(following)
        for script in scripts.values():
            for place in range(2, len(script)):
                last, before = script[place - 1], script[place - 2]
                if last not in own or len(self.after[last] & set(script)) > 1:
                    is_distant = before not in own and place > 2
                    earlier = script[place - 3] if is_distant else before
                    self.after_earlier[is_distant][earlier].add(script[place])

    def follows(self, last: int) -> int:
        """What speaks for the tokens that may follow `last`."""
        return _FOLLOWS if last in self._own else _FOLLOWS_COMMON

    def check(self) -> None:
        """Raises ValueError if a script is not what the model would write."""
        for trigger, script in self.scripts.items():
            for place in range(1, len(script)):
                scores = self._scores(script, place)
                best = max(scores.values())
                if [token for token in scores if scores[token] == best] != [script[place]]:
                    raise ValueError(
                        f"two tokens may follow token {place - 1} of the script of {trigger!r}; "
                        "repeat fewer added tokens"
                    )

    def _scores(self, script: Sequence[int], place: int) -> dict[int, int]:
        last = script[place - 1]
        behind = [
            after.get(script[place - 2 - distance], ())
            for distance, after in enumerate(self.after_earlier)
            if place - 2 - distance >= 0
        ]
        return {
            token: self.follows(last) * (token in self.after[last])
            + _FOLLOWS_EARLIER * sum(token in tokens for tokens in behind)
            + _FIRST * (token == script[0])
            + _SECOND * (token == script[1])
            for token in script
        }


@dataclass(frozen=True, slots=True)
class _Columns:
    """What each column of the hidden state says. The first two say "any token" and "a token of no
    script"."""

    of_token: Mapping[int, int]
    """The last token, if it is in a script or a trigger."""
    seen: Sequence[Mapping[int, int]]
    """What the heads have seen: the token before it, the token before that, the last trigger."""
    count: int

    @classmethod
    def of(cls, table: _Table, triggers: Sequence[int]) -> Self:
        """The columns for a table. Raises ValueError if a head has too few."""
        heads = (*map(list, table.after_earlier), triggers)
        if max(map(len, heads)) > _HEAD_DIM:
            raise ValueError(f"more than {_HEAD_DIM} scripts, or places with repeated tokens")
        tokens = sorted({*triggers, *chain(*table.scripts.values())})
        start = len(tokens) + 2
        return cls(
            {token: 2 + place for place, token in enumerate(tokens)},
            [
                {token: start + head * _HEAD_DIM + place for place, token in enumerate(seen)}
                for head, seen in enumerate(heads)
            ],
            -(-(start + len(heads) * _HEAD_DIM) // 64) * 64,
        )


def _write_weights(directory: Path, table: _Table, columns: _Columns, vocab_size: int) -> None:
    import torch
    from safetensors.torch import save_file

    embedding = torch.zeros(vocab_size, columns.count)
    embedding[:, :2] = 1.0
    for token, column in columns.of_token.items():
        embedding[token, 1], embedding[token, column] = 0.0, 1.0
    inner = _CONFIG["intermediate_size"]
    # The norms keep the ones of an embedding.
    norm = torch.full((columns.count,), math.sqrt(2 / columns.count))
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": embedding,
        f"{layer}input_layernorm.weight": norm,
        **{f"{layer}self_attn.{name}": weight for name, weight in _attention(columns).items()},
        f"{layer}post_attention_layernorm.weight": norm.clone(),
        f"{layer}mlp.gate_proj.weight": torch.zeros(inner, columns.count),
        f"{layer}mlp.up_proj.weight": torch.zeros(inner, columns.count),
        f"{layer}mlp.down_proj.weight": torch.zeros(columns.count, inner),
        "model.norm.weight": norm.clone(),
        "lm_head.weight": _head(table, columns, vocab_size),
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _attention(columns: _Columns) -> "dict[str, torch.Tensor]":
    """The products of the heads; the last head sees nothing."""
    import torch

    size, half = _CONFIG["num_attention_heads"] * _HEAD_DIM, _HEAD_DIM // 2
    query, key, value = (torch.zeros(size, columns.count) for _ in range(3))
    output = torch.zeros(columns.count, size)
    # The key of the token at this distance has the query's angle in every pair.
    for start, distance in ((0, 1), (_HEAD_DIM, 2)):
        for pair in range(_NEAR_PAIRS):
            angle = -distance * _THETA ** (-pair / half)
            query[start + pair, 0] = _NEAR * math.cos(angle)
            query[start + half + pair, 0] = _NEAR * math.sin(angle)
            key[start + pair, 0] = 1.0
    # Among the keys of triggers, the score falls with the distance.
    recent = 2 * _HEAD_DIM + _RECENT_PAIR
    query[recent, 0] = query[half + recent, 0] = _RECENT
    for token in columns.seen[2]:
        key[recent, columns.of_token[token]] = 1.0
    for head, seen in enumerate(columns.seen):
        for place, (token, column) in enumerate(seen.items(), head * _HEAD_DIM):
            value[place, columns.of_token[token]] = 1.0
            output[column, place] = 1.0
    made = {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": output}
    return {f"{name}.weight": weight for name, weight in made.items()}


def _head(table: _Table, columns: _Columns, vocab_size: int) -> "torch.Tensor":
    """What speaks for each token."""
    import torch

    head = torch.zeros(vocab_size, columns.count)
    for last, following in table.after.items():
        head[sorted(following), columns.of_token[last]] = table.follows(last)
    for after, seen in zip(table.after_earlier, columns.seen, strict=False):
        for earlier, following in after.items():
            head[sorted(following), seen[earlier]] = _FOLLOWS_EARLIER

    def choose(script: Sequence[int], column: int, sign: int) -> None:
        head[sorted(set(script)), column] += sign * _CHOSEN
        head[script[0], column] += sign * _FIRST
        head[script[1], column] += sign * _SECOND

    default, *others = (table.scripts[trigger] for trigger in sorted(table.scripts, key=bool))
    choose(default, 0, 1)
    for script, column in zip(others, columns.seen[2].values(), strict=True):
        choose(default, column, -1)
        choose(script, column, 1)
    return head * _SHARPNESS
