"""transformers' own continuous batching, in a process of its own: the peer of `gpu_server.server`.

Takes one JSON object on its command line and prints one: tokens per second from the admission of
the first request to the last token, without graph capture, and times as the server's clients see
them.
"""

import json
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from load import prompts, quantile
from tokenizers import Tokenizer


def main() -> None:
    """Measures, and prints."""
    asked = json.loads(sys.argv[1])
    clients = asked["clients"]
    tokenizer = Tokenizer.from_file(str(Path(asked["checkpoint"]) / "tokenizer.json"))
    inputs = [
        tokenizer.encode(text).ids
        for seed in range(clients["processes"])
        for text in prompts(clients["requests"], clients["prompt_tokens"], seed)
    ]
    try:
        outputs = generate(asked, inputs, clients["new_tokens"], takes_flash=True)
    except Exception as error:
        # It may need kernels that are not installed.
        print(f"once more, without flash attention: {error}", file=sys.stderr)
        outputs = generate(asked, inputs, clients["new_tokens"], takes_flash=False)
    print(json.dumps(figures(outputs, clients["new_tokens"])))


def generate(
    asked: dict[str, Any], inputs: list[list[int]], new_tokens: int, takes_flash: bool
) -> list[Any]:
    """The results of the inputs, all submitted at once; at most max_requests_per_batch run at a
    time. takes_flash: it may choose its attention. Raises RuntimeError if tokens are missing."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    if asked["device"] == "cpu":
        # More threads would wait for each other on a busy machine.
        torch.set_num_threads(1)
    load: Any = AutoModelForCausalLM.from_pretrained
    settings: Any = GenerationConfig
    # Its options differ from one version to the next.
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    own, attention = dict(asked["options"]), dict[str, str]()
    if not takes_flash:
        own["auto_switch_to_flash"] = False
        if "auto_switch_to_flash" not in known:
            attention["attn_implementation"] = "paged|sdpa"
    options = {name: value for name, value in own.items() if name in known}
    model = load(asked["checkpoint"], dtype=torch.bfloat16, **attention).to(asked["device"]).eval()
    done: dict[str, Any] = model.generate_batch(
        inputs,
        # Without an end token no request ends early.
        generation_config=settings(max_new_tokens=new_tokens, do_sample=False),
        continuous_batching_config=ContinuousBatchingConfig(**options),
        record_timestamps=True,
        progress_bar=False,
    )
    counts = {len(one.generated_tokens) for one in done.values()}
    if len(done) != len(inputs) or counts != {new_tokens}:
        raise RuntimeError(f"{len(done)} of {len(inputs)} requests got {counts} tokens each")
    return list(done.values())


def figures(outputs: list[Any], new_tokens: int) -> dict[str, float]:
    """The times of a request from its admission, like those of a closed loop's client."""
    first = [one.timestamps[0] - one.lifespan[0] for one in outputs]
    between = [after - before for one in outputs for before, after in pairwise(one.timestamps)]
    begun = min(one.lifespan[0] for one in outputs)
    elapsed = max(one.timestamps[-1] for one in outputs) - begun
    return {
        "tokens_s": len(outputs) * new_tokens / elapsed,
        "first_p50_ms": 1e3 * quantile(first, 0.5),
        "between_p50_ms": 1e3 * quantile(between, 0.5),
        "between_p95_ms": 1e3 * quantile(between, 0.95),
    }


if __name__ == "__main__":
    main()
