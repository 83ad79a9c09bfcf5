"""Runs inside the virtual environment of PyPI's `text-generation`; prints the answers as JSON.

usage: python real_client.py URL
"""

import json
import sys

from text_generation import Client
from text_generation.errors import ValidationError

PROMPT = "the cat sat on the mat and "


def main() -> None:
    client = Client(sys.argv[1], timeout=60)
    whole = client.generate(PROMPT, max_new_tokens=12, decoder_input_details=True, top_n_tokens=2)
    stream = list(client.generate_stream(PROMPT, max_new_tokens=12))
    sample = client.generate(PROMPT, max_new_tokens=12, do_sample=True, best_of=2)
    seeded = [client.generate(PROMPT, do_sample=True, seed=5).generated_text for _ in range(2)]
    full = client.generate(PROMPT, max_new_tokens=3, return_full_text=True)
    print(
        json.dumps(
            {
                "text": whole.generated_text,
                "ids": [token.id for token in whole.details.tokens],
                "finish_reason": whole.details.finish_reason,
                "prefill": "".join(token.text for token in whole.details.prefill),
                "top_tokens": [len(step) for step in whole.details.top_tokens],
                "stream_ids": [response.token.id for response in stream],
                "stream_text": stream[-1].generated_text,
                "stream_finish_reason": stream[-1].details.finish_reason,
                "best_of": len(sample.details.best_of_sequences),
                "seed": sample.details.seed,
                "seeded": seeded,
                "full": full.generated_text,
                "error": message_of(lambda: client.generate(PROMPT, max_new_tokens=100_000)),
                "stream_error": message_of(
                    lambda: list(client.generate_stream(PROMPT, max_new_tokens=100_000))
                ),
            }
        )
    )


def message_of(call) -> str:
    try:
        call()
    except ValidationError as error:
        return str(error)
    return "no ValidationError"


if __name__ == "__main__":
    main()
