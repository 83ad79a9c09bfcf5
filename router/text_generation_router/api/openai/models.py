"""GET /v1/models and /v1/models/{model}; also which names of a model are taken for ours."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from text_generation_router.api.generate import ServicesDependency
from text_generation_router.api.info import get
from text_generation_router.api.keys import KeyRoute
from text_generation_router.api.openai.errors import ERRORS, ErrorBody, ModelNotFoundError
from text_generation_router.services import Services

# What clients of TGI send without having been told a name ("dummy" is huggingface_hub's).
_ANY_MODEL = frozenset({"", "tgi", "text-generation-inference", "dummy"})
_ERRORS: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 404, "4XX")}

router = APIRouter(route_class=KeyRoute, tags=["OpenAI"])


class ModelBody(BaseModel):
    """A model that is served."""

    id: str = Field(description="A name of the model.")
    object: str = "model"
    created: int = Field(default=0, description="In seconds since 1970; 0 where it is not known.")
    owned_by: str = Field(description="The model's own id.")
    max_model_len: int = Field(description="The most tokens of a prompt and its answer together.")


class ModelListBody(BaseModel):
    """The served model, once for each of its names."""

    object: str = "list"
    data: list[ModelBody] = Field(description="The models.")


def check_model(name: str | None, services: Services) -> None:
    """Raises ModelNotFoundError for a name that is not ours, unless any name will do."""
    if name is not None and not services.config.any_model_name:
        _name_of(name, services)


def _name_of(name: str, services: Services) -> str:
    """The name of ours that was meant; ModelNotFoundError if none was."""
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
        owned_by=services.config.served_model_id,
        max_model_len=services.limits.max_total_tokens,
    )


@get(router, "/v1/models", summary="Get model info", responses={401: {"model": ErrorBody}})
async def openai_get_model_info(services: ServicesDependency) -> ModelListBody:
    """The served model, once for each of its names."""
    return ModelListBody(data=[_model(name, services) for name in services.config.model_names])


@get(router, "/v1/models/{model:path}", summary="Get one model", responses=_ERRORS)
async def openai_get_model(model: str, services: ServicesDependency) -> ModelBody:
    """The served model by its name, which may have slashes."""
    return _model(_name_of(model, services), services)
