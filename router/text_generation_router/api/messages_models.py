"""The served model as Anthropic's clients list it: they say that they are by a header."""

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import Request
from pydantic import BaseModel, Field

from text_generation_router.services import Services

_HEADER = "anthropic-version"


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
    """Whether one of Anthropic's clients asks."""
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
    """A page of the names. One that stands behind or before a name we do not have is empty."""
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
