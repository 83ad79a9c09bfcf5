"""The HTTP server, the continuous-batching loop and all text processing.

`LLM` and `SamplingParams` generate without a server.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from text_generation_router.offline import LLM as LLM
    from text_generation_router.offline import SamplingParams as SamplingParams

_OFFLINE = ("LLM", "SamplingParams")


def __getattr__(name: str) -> Any:
    """Imports the offline part on first use: the server does not need it."""
    if name not in _OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from text_generation_router import offline

    return getattr(offline, name)
