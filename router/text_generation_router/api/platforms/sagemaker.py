"""POST /invocations, where Amazon SageMaker sends everything; its health check is /ping."""

from typing import Annotated, Any

from fastapi import Response
from pydantic import Discriminator, Tag

from text_generation_router.api.errors import TGI_ERRORS
from text_generation_router.api.openai.answers import ChatCompletion, Completion
from text_generation_router.api.openai.chat import chat_completions
from text_generation_router.api.openai.completions import completions
from text_generation_router.api.openai.schemas import ChatRequest, CompletionRequest
from text_generation_router.api.routes import ServicesDependency, events, post_router
from text_generation_router.api.tgi.generate import compat_generate
from text_generation_router.api.tgi.schemas import CompatGenerateRequest, GenerateResponse

router = post_router("SageMaker", TGI_ERRORS)


def _kind(body: Any) -> str | None:
    """The first field that only one of the three bodies has."""
    for field in ("inputs", "messages", "prompt"):
        if field in body if isinstance(body, dict) else hasattr(body, field):
            return field
    return None


SagemakerRequest = Annotated[
    Annotated[CompatGenerateRequest, Tag("inputs")]
    | Annotated[ChatRequest, Tag("messages")]
    | Annotated[CompletionRequest, Tag("prompt")],
    Discriminator(
        _kind,
        custom_error_type="no_kind",
        custom_error_message="data did not match any variant of untagged enum SagemakerRequest; "
        "one of `inputs`, `messages` and `prompt` is needed",
    ),
]


@router.post(
    "/invocations",
    summary="Generate tokens from Sagemaker request",
    response_model=list[GenerateResponse] | ChatCompletion | Completion,
    responses=events("The answer, or with `stream` its events."),
)
async def sagemaker_compatibility(body: SagemakerRequest, services: ServicesDependency) -> Response:
    """What POST / does with `inputs`, /v1/chat/completions with `messages`, and /v1/completions
    with `prompt`."""
    match body:
        case ChatRequest():
            return await chat_completions(body, services)
        case CompletionRequest():
            return await completions(body, services)
        case _:
            return await compat_generate(body, services)
