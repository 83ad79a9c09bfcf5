"""Generation without HTTP: `LLM` in Python, and files of requests.

Shards and scheduler are the same as in a server.
"""

from text_generation_router.offline.bulk import CompletionOutput, RequestOutput
from text_generation_router.offline.llm import LLM, LLMError
from text_generation_router.offline.sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "LLMError", "RequestOutput", "SamplingParams"]
