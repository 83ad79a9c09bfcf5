"""The headers with the times of an answer."""

from collections.abc import Sequence

from text_generation_router.infer import Ending
from text_generation_router.services import Services


def timing_headers(
    endings: Sequence[Ending], prompt_tokens: int, characters: int, services: Services
) -> dict[str, str]:
    """Sums over all sequences, as TGI has them: whole milliseconds, but x-compute-time in seconds.

    `prompt_tokens` and `characters` are those of all prompts, each counted once.
    """
    durations = [ending.durations for ending in endings]
    total_s = sum(d.total_s for d in durations)
    milliseconds = {
        "x-total-time": total_s,
        "x-validation-time": sum(d.validation_s for d in durations),
        "x-queue-time": sum(d.queue_s for d in durations),
        "x-inference-time": sum(d.inference_s for d in durations),
        "x-time-per-token": sum(d.time_per_token_s for d in durations),
    }
    return {
        "x-compute-type": services.compute_type,
        "x-compute-time": f"{total_s:.9f}",
        "x-compute-characters": str(characters),
        **{name: str(int(seconds * 1000)) for name, seconds in milliseconds.items()},
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(sum(ending.generated.generated_tokens for ending in endings)),
    }
