"""POST /tokenize: the tokens of a text."""

from fastapi import APIRouter, Request, Response

from text_generation_router.api.body import JsonRoute
from text_generation_router.api.dependencies import ServicesDependency
from text_generation_router.api.errors import ERRORS
from text_generation_router.api.keys import NEEDS_KEY
from text_generation_router.api.tgi.schemas import GenerateRequest
from text_generation_router.api.tokens import TokenizedToken, encoded, render_tokens, token_answer

router = APIRouter(
    route_class=JsonRoute, dependencies=NEEDS_KEY, tags=["Text Generation Inference"]
)


@router.post(
    "/tokenize",
    summary="Tokenize inputs",
    response_model=list[TokenizedToken],
    responses=ERRORS,
)
async def tokenize(
    body: GenerateRequest, request: Request, services: ServicesDependency
) -> Response:
    """The tokens of the inputs with their byte offsets."""
    with services.infer.admitted(1):
        encoding = await encoded(body.inputs, request, services, add_special_tokens=True)
    if encoding is None:
        return Response(status_code=499)
    return token_answer(body.inputs, encoding, render_tokens(body.inputs, encoding), services)
