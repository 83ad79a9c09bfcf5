"""The reference by `transformers`: tokens and log-probabilities that the server must reproduce."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from integration_tests.checkpoints import FAMILIES

# Around the block sizes of the attention backends, and up to several windows of the tiny models.
PROMPT_LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 24, 31, 33, 40, 70, 100, 150)

_TEXT = (
    "The dog ran — très vite — in the rain; what is 日本語? def add(first, second): return first. "
    "Where the sun sat on the mat 🐍🚀, the cat and 17 others said: “there is more to this thing”! "
)


def ragged_prompts(model_path: Path) -> list[str]:
    """Texts of PROMPT_LENGTHS tokens each, without common prefixes."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    prompts = []
    for index, length in enumerate(PROMPT_LENGTHS):
        text = (_TEXT * 8)[7 * index :]
        end = next(i for i in range(1, len(text)) if len(tokenizer.encode(text[:i])) >= length)
        prompts.append(text[:end])
    return prompts


class Oracle:
    """A checkpoint in transformers, one prompt at a time, without batching or padding; by default
    in float32 on the CPU. One that is of no family has no rope that changes with the length."""

    def __init__(
        self,
        model_path: Path,
        family: str | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.set_num_threads(1)  # tiny matrices; the servers need the cores
        self._model_path, self._device, self._dtype = model_path, device, dtype
        # Dynamic rope keeps the largest length it has seen, so such a model serves one prompt.
        self._is_stateful = family is not None and FAMILIES[family].switch_length is not None
        self._model = self._load()
        self.tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))

    def _load(self) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(self._model_path, dtype=self._dtype)
        return model.to(self._device).eval()

    def _fresh(self) -> torch.nn.Module:
        return self._load() if self._is_stateful else self._model

    def encode(self, text: str) -> list[int]:
        """The ids of a text, special tokens added."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def greedy(self, text: str, max_new_tokens: int) -> list[int]:
        """The ids greedy search appends."""
        ids = torch.tensor([self.encode(text)], device=self._device)
        answer = self._fresh().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        new: list[int] = answer[0, ids.shape[1] :].tolist()
        return new

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each id but the first, given those before it."""
        given = torch.tensor([list(ids)], device=self._device)
        logits = self._fresh()(given).logits[0, :-1].float().cpu()
        chosen = torch.tensor(list(ids[1:]))[:, None]
        found: list[float] = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        return found
