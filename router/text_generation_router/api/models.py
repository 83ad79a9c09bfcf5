"""GET /v1/models and /v1/models/{model}, for OpenAI's and Anthropic's clients; the check of a
request's `model`."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from text_generation_router.api.answers import json_response
from text_generation_router.api.errors import OPENAI_ERRORS, ModelNotFoundError, is_anthropics
from text_generation_router.api.routes import ServicesDependency, get
from text_generation_router.edge.keys import NEEDS_KEY
from text_generation_router.services import Services

# Names that clients of TGI send by default ("dummy" is huggingface_hub's).
_ANY_MODEL = frozenset({"", "tgi", "text-generation-inference", "dummy"})
_ERRORS = {status: OPENAI_ERRORS[status] for status in (401, 404, "4XX")}
# A page that can not be is 400.
_LIST_ERRORS = {status: _ERRORS[status] for status in (401, "4XX")}

router = APIRouter(dependencies=NEEDS_KEY, tags=["OpenAI"])


class ModelBody(BaseModel):
    """A model that is served."""

    id: str = Field(description="A name of the model.")
    object: str = "model"
    created: int = Field(description="When this server had loaded it, in seconds since 1970.")
    owned_by: str = Field(description="The model's own id.")
    max_model_len: int = Field(description="The most tokens of a prompt and its answer together.")


class ModelListBody(BaseModel):
    """The served model, once for each of its names."""

    object: str = "list"
    data: list[ModelBody] = Field(description="The models.")


def check_model(name: str | None, services: Services) -> None:
    """Raises ModelNotFoundError for an unknown name, unless the server accepts any."""
    if name is not None and not services.config.any_model_name:
        _name_of(name, services)


def _name_of(name: str, services: Services) -> str:
    """The served name that is meant. Raises ModelNotFoundError."""
    names = services.config.model_names
    if name in names:
        return name
    short = {one.rstrip("/").rpartition("/")[2]: one for one in reversed(names)}
    if name in _ANY_MODEL or name in short:
        return short.get(name, names[0])
    raise ModelNotFoundError(name, names[0])


def _model(name: str, services: Services) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": services.loaded_at,
        "owned_by": services.config.served_model_id,
        "max_model_len": services.limits.max_total_tokens,
    }


def _anthropic_model(name: str, services: Services) -> dict[str, Any]:
    limits = services.limits
    created = datetime.fromtimestamp(services.loaded_at, UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": limits.max_input_tokens,
        "max_tokens": limits.max_total_tokens - 1,
    }


@get(
    router,
    "/v1/models",
    summary="Get model info",
    response_model=ModelListBody,
    responses=_LIST_ERRORS,
)
async def openai_get_model_info(services: ServicesDependency, request: Request) -> Response:
    """The served model, once for each of its names; in Anthropic's form for its clients, whose
    header is `anthropic-version`. There is one page."""
    names = services.config.model_names
    if not is_anthropics(request):
        models = [_model(name, services) for name in names]
        return json_response({"object": "list", "data": models})
    data = [_anthropic_model(name, services) for name in names]
    ends = {"first_id": names[0], "last_id": names[-1]}
    return json_response({"data": data, "has_more": False, **ends})


@get(
    router,
    "/v1/models/{model:path}",
    summary="Get one model",
    response_model=ModelBody,
    responses=_ERRORS,
)
async def openai_get_model(model: str, services: ServicesDependency, request: Request) -> Response:
    """The served model by its name, which may have slashes; in Anthropic's form for its clients."""
    name = _name_of(model, services)
    form = _anthropic_model if is_anthropics(request) else _model
    return json_response(form(name, services))
