"""GET /v1/models and /v1/models/{model}, for OpenAI's and Anthropic's clients; the check of a
request's `model`."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from text_generation_router.api.keys import NEEDS_KEY
from text_generation_router.api.routes import ServicesDependency, get
from text_generation_router.api.v1_errors import ERRORS, ModelNotFoundError
from text_generation_router.services import Services

# By this header Anthropic's clients are known.
_HEADER = "anthropic-version"
# Names that clients of TGI send by default ("dummy" is huggingface_hub's).
_ANY_MODEL = frozenset({"", "tgi", "text-generation-inference", "dummy"})
_ERRORS: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 404, "4XX")}
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


def _model(name: str, services: Services) -> ModelBody:
    return ModelBody(
        id=name,
        created=services.loaded_at,
        owned_by=services.config.served_model_id,
        max_model_len=services.limits.max_total_tokens,
    )


class Page(BaseModel):
    """The part of the list that Anthropic's clients ask for; OpenAI's get all of it."""

    limit: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=20, description="The most models to list, for Anthropic's clients."
    )
    after_id: str | None = Field(
        default=None, description="List the models after this one, for Anthropic's clients."
    )
    before_id: str | None = Field(
        default=None, description="List what is before this model, for Anthropic's clients."
    )


class AnthropicModel(BaseModel):
    """A model that is served."""

    type: Literal["model"] = "model"
    id: str = Field(description="A name of the model.")
    display_name: str = Field(description="The same name.")
    created_at: str = Field(description="When this server had loaded it.")
    lifecycle: Literal["active"] = Field(default="active", description="Always active.")
    max_input_tokens: int = Field(description="The most tokens of a prompt.")
    max_tokens: int = Field(description="The most tokens of an answer.")


class AnthropicModelList(BaseModel):
    """The served model, once for each of its names."""

    data: list[AnthropicModel] = Field(description="The models.")
    has_more: bool = Field(description="Whether there are more.")
    first_id: str | None = Field(description="The first name of the list.")
    last_id: str | None = Field(description="The last name of the list.")


def is_anthropics(request: Request) -> bool:
    """Whether one of Anthropic's clients sends this request."""
    return _HEADER in request.headers


def anthropic_model(name: str, services: Services) -> AnthropicModel:
    """The served model by one of its names."""
    limits = services.limits
    created = datetime.fromtimestamp(services.loaded_at, UTC)
    return AnthropicModel(
        id=name,
        display_name=name,
        created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=limits.max_input_tokens,
        max_tokens=limits.max_total_tokens - 1,
    )


def anthropic_models(services: Services, page: Page) -> AnthropicModelList:
    """A page of the names. A page after or before an unknown name is empty."""
    names = list(services.config.model_names)
    if page.before_id is not None:
        left = names[: names.index(page.before_id)] if page.before_id in names else []
        shown = left[-page.limit :]
    else:
        left = names
        if page.after_id is not None:
            known = page.after_id in names
            left = names[names.index(page.after_id) + 1 :] if known else []
        shown = left[: page.limit]
    return AnthropicModelList(
        data=[anthropic_model(name, services) for name in shown],
        has_more=len(left) > len(shown),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )


@get(router, "/v1/models", summary="Get model info", responses=_LIST_ERRORS)
async def openai_get_model_info(
    services: ServicesDependency, page: Annotated[Page, Query()], request: Request
) -> ModelListBody | AnthropicModelList:
    """The served model, once for each of its names; in Anthropic's form for its clients, whose
    header is `anthropic-version`, and which may ask for a part of the list."""
    if is_anthropics(request):
        return anthropic_models(services, page)
    return ModelListBody(data=[_model(name, services) for name in services.config.model_names])


@get(router, "/v1/models/{model:path}", summary="Get one model", responses=_ERRORS)
async def openai_get_model(
    model: str, services: ServicesDependency, request: Request
) -> ModelBody | AnthropicModel:
    """The served model by its name, which may have slashes; in Anthropic's form for its clients."""
    name = _name_of(model, services)
    return anthropic_model(name, services) if is_anthropics(request) else _model(name, services)
