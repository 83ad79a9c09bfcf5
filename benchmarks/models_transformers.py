"""transformers in a process of its own: the peer of models.py.

Takes one JSON object on its command line and prints one. It is continuous batching; where that
refuses the model it is `generate` in batches of as many rows as there are clients, which wait for
each other. Both get all prompts at once. A first run of a few tokens warms it up.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from load import prompts
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

PAGE_SIZE = 256
"""Its default. Pages of 32 were no faster: 22 s of processor time for 32 requests of SmolLM2."""
MOST_TOKENS = 256
"""Of one pass: that took 20 s, 512 22 s, 4096 28 s, since every token is masked against all others.
Its compiler took two minutes more, and eager attention a third more than SDPA."""
WARM_UP_TOKENS = 4


def main() -> None:
    """Measures, and prints."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    tokenizer = Tokenizer.from_file(str(Path(asked["checkpoint"]) / "tokenizer.json"))
    texts = prompts(asked["requests"], asked["prompt_tokens"], asked["seed"])
    inputs = [tokenizer.encode(text).ids for text in texts]
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(asked["checkpoint"], dtype=getattr(torch, asked["dtype"])).eval()
    clients, new_tokens = asked["clients"], asked["new_tokens"]
    run, how, refusal = continuous, "continuous batching", ""
    try:
        continuous(model, inputs[:clients], clients, WARM_UP_TOKENS)
    except (RuntimeError, ValueError) as error:
        run, how, refusal = static, "generate, as continuous batching refuses it", str(error)
        static(model, inputs[:clients], clients, WARM_UP_TOKENS)
    elapsed_s = run(model, inputs, clients, new_tokens)
    figures = {"tokens_per_s": len(inputs) * new_tokens / elapsed_s, "elapsed_s": elapsed_s}
    print(json.dumps({**figures, "how": how, "refusal": refusal}))


def continuous(model: Any, inputs: list[list[int]], clients: int, new_tokens: int) -> float:
    """Seconds from the admission of the first request to the last token; at most `clients` requests
    run at a time. Raises RuntimeError if tokens are missing, ValueError if it refuses the model."""
    longest = len(inputs[0]) + new_tokens
    settings: Any = GenerationConfig
    done: dict[str, Any] = model.generate_batch(
        inputs,
        # Without an end token no request ends early.
        generation_config=settings(max_new_tokens=new_tokens, do_sample=False),
        # Unless it is told, it takes most of the memory and spends half a minute on writing it.
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=2 * clients * -(-longest // PAGE_SIZE),
            max_batch_tokens=MOST_TOKENS,
            max_requests_per_batch=clients,
            allow_block_sharing=False,
        ),
        record_timestamps=True,
        progress_bar=False,
    )
    counts = {len(one.generated_tokens) for one in done.values()}
    if len(done) != len(inputs) or counts != {new_tokens}:
        raise RuntimeError(f"{len(done)} of {len(inputs)} requests got {counts} tokens each")
    begun: float = min(one.lifespan[0] for one in done.values())
    ended: float = max(one.timestamps[-1] for one in done.values())
    return ended - begun


def static(model: Any, inputs: list[list[int]], clients: int, new_tokens: int) -> float:
    """Seconds of `generate` for all, in batches of prompts of one length."""
    begun = time.perf_counter()
    for first in range(0, len(inputs), clients):
        rows = torch.tensor(inputs[first : first + clients])
        model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
