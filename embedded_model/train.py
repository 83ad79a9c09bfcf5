"""Trains the embedded model from the standard library of the Python that runs this.

`--state` keeps the state of a run, from which `--resume` continues.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from embedded_model.batches import IGNORED, SHORT_ROW, TOKENS_PER_STEP, Batch, RowMaker
from embedded_model.corpus import build_entries
from embedded_model.save import load_tokenizer, save_model, save_tokenizer, train_tokenizer

SEED = 20240229
ROOT = Path(__file__).parents[1]
DEFAULT_OUTPUT = ROOT / "launcher" / "text_generation_launcher" / "embedded_model"
DEFAULT_STATE = Path.home() / ".cache" / "pytgi" / "embedded_model"
DEFAULT_RESULT = Path(__file__).with_name("result.json")
WARMUP_STEPS = 100
PEAK_RATE = 3e-3
FINAL_RATE = 3e-5
WEIGHT_DECAY = 0.05
SAVE_EVERY = 200
REPORT_EVERY = 20


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    seconds: float = 0.0
    loss: float = 0.0


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A new model of 5.4 million parameters."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine down to the final rate."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return FINAL_RATE + (PEAK_RATE - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the scales of the norms alone."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    scales = [weight for weight in model.parameters() if weight.dim() == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": scales, "weight_decay": 0.0},
        ],
        lr=PEAK_RATE,
        betas=(0.9, 0.98),
        fused=True,
    )


class Trainer:
    """A model and the two ways to run it.

    Short rows go through a compiled trunk that writes the attention out, which on a processor
    is a third faster than the fused kernel; long rows need the fused kernel, for their memory.
    """

    def __init__(self, model: LlamaForCausalLM, device: torch.device) -> None:
        self.model = model
        self.device = device
        self._short = torch.compile(model.model, dynamic=False)

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the last layer gives for each position."""
        short = inputs.shape[1] == SHORT_ROW
        self.model.set_attn_implementation("eager" if short else "sdpa")
        trunk = self._short if short else self.model.model
        hidden: torch.Tensor = trunk(input_ids=inputs, use_cache=False).last_hidden_state
        return hidden

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean loss of the positions that are learnt.

        Weights stay in float32; the products are done in bfloat16, which is several times as
        fast where the processor knows it.
        """
        inputs, targets = batch.inputs.to(self.device), batch.targets.to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            # Logits only where something is learnt: the head is a quarter of the work.
            learnt = targets != IGNORED
            logits = self.model.lm_head(self.hidden(inputs)[learnt])
        return cross_entropy(logits.float(), targets[learnt])


def save_state(
    folder: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Write what `--resume` needs, so that an interruption never leaves half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "state.pt.tmp"
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "progress": asdict(progress),
        },
        unfinished,
    )
    unfinished.replace(folder / "state.pt")


def load_state(folder: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> Progress:
    """Put a saved run's state back."""
    state: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def report(progress: Progress, steps: int, rate: float, speed: float) -> None:
    """One line on how far the run is."""
    left = (steps - progress.step) * TOKENS_PER_STEP / max(speed, 1.0)
    print(
        f"step {progress.step}/{steps}  loss {progress.loss:.4f}  rate {rate:.2e}  "
        f"{speed:,.0f} tokens/s  {left / 60:.1f} min left",
        flush=True,
    )


def train(arguments: argparse.Namespace) -> None:
    """Run the training, from the start or from the saved state, and save the model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    entries = build_entries()
    if arguments.resume:
        tokenizer = load_tokenizer(arguments.state)
    else:
        tokenizer = train_tokenizer(entries)
        save_tokenizer(tokenizer, arguments.state)
    rows = RowMaker(entries, tokenizer, SEED)
    model = build_model(tokenizer)
    model.to(device)  # type: ignore[arg-type]
    optimizer = build_optimizer(model)
    progress = load_state(arguments.state, model, optimizer) if arguments.resume else Progress()
    print(f"{len(entries)} entries, {model.num_parameters():,} parameters, {device}", flush=True)
    # The stream of rows has no way to jump: what was already trained on is made and dropped.
    for step in range(progress.step):
        rows.batch(step)
    run_steps(model, optimizer, rows, progress, arguments, device)
    save_state(arguments.state, model, optimizer, progress)
    save_model(model, tokenizer, arguments.output)
    write_result(arguments.result, progress, device, len(entries))


def write_result(path: Path, progress: Progress, device: torch.device, entries: int) -> None:
    """Write what the run was, which `evaluate` adds the scores to."""
    cores = torch.get_num_threads()
    where = "a GPU" if device.type == "cuda" else f"{cores} CPU core{'s' if cores > 1 else ''}"
    training = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "device": where,
        "seed": SEED,
        "steps": progress.step,
        "tokens": progress.step * TOKENS_PER_STEP,
        "minutes": round(progress.seconds / 60, 1),
        "training_loss": round(progress.loss, 4),
        "entries": entries,
    }
    path.write_text(json.dumps({"training": training}, indent=2) + "\n", "utf-8")


def run_steps(
    model: LlamaForCausalLM,
    optimizer: torch.optim.AdamW,
    rows: RowMaker,
    progress: Progress,
    arguments: argparse.Namespace,
    device: torch.device,
) -> None:
    """The loop itself."""
    model.train()
    trainer = Trainer(model, device)
    last = time.monotonic()
    while progress.step < arguments.steps:
        rate = learning_rate(progress.step, arguments.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = trainer.loss(rows.batch(progress.step))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.step += 1
        value = float(loss.detach())
        progress.loss = value if progress.step == 1 else 0.95 * progress.loss + 0.05 * value
        if progress.step % REPORT_EVERY == 0:
            now = time.monotonic()
            progress.seconds += now - last
            report(progress, arguments.steps, rate, REPORT_EVERY * TOKENS_PER_STEP / (now - last))
            last = now
        if progress.step % SAVE_EVERY == 0:
            save_state(arguments.state, model, optimizer, progress)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--state", type=Path, default=DEFAULT_STATE)
    parser.add_argument("--result", type=Path, default=DEFAULT_RESULT)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the saved state")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
