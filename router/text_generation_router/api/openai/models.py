"""GET /v1/models and /v1/models/{model}; also which names of a model are taken for ours."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

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

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str


class ModelListBody(BaseModel):
    """All served models: one."""

    object: str = "list"
    data: list[ModelBody]


def check_model(name: str | None, services: Services) -> None:
    """Raises ModelNotFoundError for a name that is neither ours nor one that means any model."""
    served = services.config.served_model_id
    known = _ANY_MODEL | {served, served.rstrip("/").rpartition("/")[2]}
    if name is not None and name not in known:
        raise ModelNotFoundError(name, served)


def _model(services: Services) -> ModelBody:
    served = services.config.served_model_id
    return ModelBody(id=served, owned_by=served)


@get(router, "/v1/models", summary="Get model info", responses={401: {"model": ErrorBody}})
async def openai_get_model_info(services: ServicesDependency) -> ModelListBody:
    """The served model, in a list."""
    return ModelListBody(data=[_model(services)])


@get(router, "/v1/models/{model:path}", summary="Get one model", responses=_ERRORS)
async def openai_get_model(model: str, services: ServicesDependency) -> ModelBody:
    """The served model by its name, which may have slashes."""
    check_model(model, services)
    return _model(services)
