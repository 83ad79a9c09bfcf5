"""Bodies of other dialects on the paths of clouds: Google's Vertex AI has /vertex and those that it
names with AIP_* variables; Amazon SageMaker sends everything to /invocations."""

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Discriminator, Field, Tag

from text_generation_router.api.answers import json_response
from text_generation_router.api.errors import TGI_ERRORS
from text_generation_router.api.openai.chat import ChatCompletion, ChatRequest, chat_completions
from text_generation_router.api.openai.completions import Completion, CompletionRequest, completions
from text_generation_router.api.routes import ServicesDependency, events, get, post_router
from text_generation_router.api.tgi.generate import (
    CompatGenerateRequest,
    GenerateRequest,
    GenerateResponse,
    compat_generate,
    generate_answer,
)
from text_generation_router.api.tgi.info import health
from text_generation_router.config import RouterConfig
from text_generation_router.errors import ValidationError
from text_generation_router.fields import Body, Bounded
from text_generation_router.infer import gather_or_cancel
from text_generation_router.services import Services

sagemaker_router = post_router("SageMaker", TGI_ERRORS)
router = post_router("Vertex", TGI_ERRORS)


def _kind(instance: Any) -> str:
    is_chat = "messages" in instance if isinstance(instance, dict) else False
    return "chat" if is_chat or isinstance(instance, ChatRequest) else "generate"


Instance = Annotated[
    Annotated[GenerateRequest, Tag("generate")] | Annotated[ChatRequest, Tag("chat")],
    Discriminator(_kind),
]


class VertexRequest(Body):
    """Bodies of /generate and of /v1/chat/completions, in any order."""

    instances: Annotated[Annotated[list[Instance], Field(min_length=1)], Bounded()] = Field(
        description="One request each. All are generated at the same time."
    )


@router.post(
    "/vertex",
    summary="Generate tokens from Vertex request",
)
async def vertex_compatibility(body: VertexRequest, services: ServicesDependency) -> Response:
    """Generates for all instances at once; one failure fails all. One prediction an instance, in
    order: its text, or /generate's answer with `details`."""
    services.metrics.request_count.inc(len(body.instances))
    services.infer.check_could_fit(len(body.instances), services.options)
    work = [_prediction(instance, services) for instance in body.instances]
    predictions = await gather_or_cancel(work)
    return json_response({"predictions": predictions})


def aip_routers(config: RouterConfig) -> tuple[APIRouter, ...]:
    """The same predictions and health on the paths that the configuration names."""
    predict = post_router("Vertex", TGI_ERRORS)
    live = APIRouter()
    if (path := config.aip_predict_route) is not None:
        predict.post(path, include_in_schema=False)(vertex_compatibility)
    if (path := config.aip_health_route) is not None:
        get(live, path, include_in_schema=False)(health)
    return (predict, live)


async def _prediction(instance: Instance, services: Services) -> Any:
    """Of a chat the text as the model wrote it, with its tool calls in their markers."""
    if not isinstance(instance, ChatRequest):
        asked = instance.to_parameters()
        best, others = await services.infer.generate_best_of(asked, services.options)
        answer = generate_answer(best, others, asked)
        return answer if "details" in answer else answer["generated_text"]
    details = instance.logprobs, instance.return_token_ids, instance.prompt_logprobs is not None
    if instance.stream or any(details) or instance.num_sequences != 1:
        raise ValidationError(
            "a prediction is one text; leave `stream`, `n`, `logprobs`, `prompt_logprobs` and "
            "`return_token_ids` out, or use /v1/chat/completions"
        )
    started = services.chat.start(instance.to_conversation(), services.options)
    async with started as (generation,):
        message = await generation.collect()
    return "".join(output.delta for output in message.outputs)


def _field(body: Any) -> str | None:
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
        _field,
        custom_error_type="no_field",
        custom_error_message="data did not match any variant of untagged enum SagemakerRequest; "
        "one of `inputs`, `messages` and `prompt` is needed",
    ),
]


@sagemaker_router.post(
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
