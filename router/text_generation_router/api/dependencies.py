"""What route functions depend on, and the registration of GET routes."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request

from text_generation_router.api.keys import caller_of
from text_generation_router.api.terms import terms_of
from text_generation_router.request_id import TRACE
from text_generation_router.services import Services

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


async def services_of(request: Request) -> Services:
    """The services of the app, on behalf of the caller of this request."""
    services = request.app.state.services
    assert isinstance(services, Services)
    scope = request.scope
    return services.on_behalf_of(caller_of(scope), terms_of(scope), scope.get(TRACE))


ServicesDependency = Annotated[Services, Depends(services_of)]


def get(router: APIRouter, path: str, **options: Any) -> Callable[[Handler], Handler]:
    """A GET route that answers HEAD as well, as TGI's do."""

    def register(handler: Handler) -> Handler:
        router.add_api_route(path, handler, methods=["GET"], **options)
        router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
        return handler

    return register
