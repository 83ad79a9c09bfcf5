"""How the APIs of OpenAI and Anthropic ask for randomness, in the words of `GenerateParameters`."""

from typing import Any


def sampling(
    temperature: float | None, top_p: float | None, top_k: int | None = None
) -> dict[str, Any]:
    """Tokens are drawn unless temperature or top_p is 0; both are 1 if left out."""
    if 0 in (temperature, top_p):
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": temperature,
        # `GenerateParameters` has no 1.0, which cuts nothing off.
        "top_p": None if top_p == 1 else top_p,
        "top_k": top_k,
    }
