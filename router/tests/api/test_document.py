"""The OpenAPI document: everything in it is described, and what it shows in an editor is given."""

from collections.abc import Iterator
from typing import Any

import pytest
from text_generation_process.sampling import NUMBERS
from text_generation_router.api.openai.sampling import (
    SamplingBody,
    StructuredOutputsBody,
    VllmChatBody,
)
from text_generation_router.api.routes import BODIES, PARAMETERS
from text_generation_router.app import create_app
from text_generation_router.config import RouterConfig

Json = dict[str, Any]
# Routes whose fields their inventors describe: here only what is this server's own.
OTHERS = ("/v1/messages", "/v1/responses", "/v2/", "/score", "/v1/score", "/rerank", "/v1/rerank")
VLLMS = (VllmChatBody.model_fields.keys() - SamplingBody.model_fields.keys()) | {
    field.alias or name for name, field in StructuredOutputsBody.model_fields.items()
}
VLLMS |= {name for name, number in NUMBERS.items() if not number.about}
# Fields of answers whose meaning is plain from their names. A request's are all described.
PLAIN = {"id", "index", "message", "model", "name", "object", "role", "text", "type"}


@pytest.fixture(scope="module")
def document() -> Json:
    return create_app(RouterConfig(tokenizer_name="")).openapi()


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Path, method, operation."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def schemas(document: Json) -> dict[str, Json]:
    described: dict[str, Json] = document["components"]["schemas"]
    return described


def references(value: Any) -> Iterator[str]:
    """The names of the schemas that a part of the document refers to."""
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference.rpartition("/")[2]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def schemas_of(document: Json, *parts: str) -> set[str]:
    """The names of the schemas that these parts of the operations are made of, without those of
    OTHERS."""
    found: set[str] = set()
    new = {
        name
        for path, _, operation in operations(document)
        if not path.startswith(OTHERS)
        for name in references([operation.get(part) for part in parts])
    }
    while new:
        found |= new
        new = set(references([document["components"]["schemas"][name] for name in new])) - found
    return found


def is_described(field: Json) -> bool:
    """By itself, by one of the forms that it can have, or because it has one value only."""
    forms = (field, *field.get("anyOf", ()), *field.get("oneOf", ()))
    return "const" in field or any(form.get("description") for form in forms)


def test_every_operation_and_schema_is_described(document: Json) -> None:
    for path, method, operation in operations(document):
        assert operation["summary"] and operation["description"], (method, path)
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description"), (method, path, parameter["name"])
    nameless = [name for name, schema in schemas(document).items() if not schema.get("description")]
    assert not nameless, "\n".join(nameless)


def test_every_field_is_described(document: Json) -> None:
    requests = schemas_of(document, "requestBody")
    missing = [
        f"{name}.{field}"
        for name in schemas_of(document, "requestBody", "responses")
        for field, form in schemas(document)[name].get("properties", {}).items()
        if not is_described(form)
        and field not in VLLMS
        and (name in requests or field not in PLAIN)
    ]
    assert not missing, "\n".join(missing)


def test_every_post_route_and_path_parameter_has_an_example(document: Json) -> None:
    posts = {path for path, method, _ in operations(document) if method == "post"}
    assert posts == BODIES.keys()
    parameters = {
        parameter["name"]
        for _, _, operation in operations(document)
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "path"
    }
    assert parameters == PARAMETERS.keys()


def test_no_examples_stand_where_fields_are_not(document: Json) -> None:
    """An example's fields are the body's: those that it lacks would not be read."""
    for path, method, operation in operations(document):
        if method != "post":
            continue
        content = operation["requestBody"]["content"]["application/json"]
        known = {
            field
            for name in references(content["schema"])
            for field in document["components"]["schemas"][name]["properties"]
        }
        for name, example in content["examples"].items():
            assert example["value"].keys() <= known, (path, name)
