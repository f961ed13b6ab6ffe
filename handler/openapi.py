"""The OpenAPI 3.1 document: the routes it is given, described by the schemas that check bodies.

What requests hold is derived from the pydantic models, so it cannot differ from what is checked;
what answers hold is in `handler.openapi_answers`.

Must not know: Flask, settings, the model, which paths there are.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import AliasChoices
from pydantic.json_schema import models_json_schema

from handler.openapi_answers import ANSWERS, ERROR_OF, named
from handler.openapi_operations import OPERATIONS, Operation
from handler.schema.openai import (
    NOT_SERVED,
    ChatBody,
    CompletionBody,
    GenerationFields,
    StreamOptions,
)
from handler.schema.tgi import GenerateBody, Parameters, TokenizeBody
from handler.schema.validation import RequestBody
from handler.schema.vllm import DetokenizeBody, TokenizeChatBody, TokenizeTextBody

Json = dict[str, Any]

_BODIES: tuple[type[RequestBody], ...] = (
    ChatBody,
    CompletionBody,
    StreamOptions,
    GenerateBody,
    Parameters,
    TokenizeBody,
    TokenizeTextBody,
    TokenizeChatBody,
    DetokenizeBody,
)
_NULL = {"type": "null"}


@dataclass(frozen=True)
class Route:
    """One method of one path; `operation` is a key of `OPERATIONS`."""

    method: str
    path: str
    """With parameters in braces, as OpenAPI writes them."""
    operation: str


def document(routes: Iterable[Route], version: str) -> Json:
    """The document of a server with these routes. Raises KeyError for an unknown operation."""
    paths: Json = {}
    for route in sorted(routes, key=lambda route: (route.path, route.method)):
        described = _operation(OPERATIONS[route.operation], route.path)
        paths.setdefault(route.path, {})[route.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Invocant",
            "version": version,
            "description": "A language model behind OpenAI's API, TGI's API and SageMaker's "
            "`/invocations`. Null is the same as leaving a field out; unknown fields are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": _body_schemas() | ANSWERS,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed where the server was started with an API key.",
                }
            },
        },
    }


def _operation(operation: Operation, path: str) -> Json:
    described: Json = {"summary": operation.summary, "responses": _responses(operation)}
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if operation.bodies:
        described["security"] = [{}, {"key": []}]
        described["requestBody"] = {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _one_of([named(body.__name__) for body in operation.bodies]),
                    "examples": {
                        name: {"value": example} for name, example in operation.examples.items()
                    },
                }
            },
        }
    return described


def _responses(operation: Operation) -> Json:
    content: Json = {}
    if operation.answers:
        content["application/json"] = {"schema": _one_of([*map(named, operation.answers)])}
    if operation.events:
        content["text/event-stream"] = {"schema": _one_of([*map(named, operation.events)])}
    if operation.is_page:
        content["text/html"] = {"schema": {"type": "string"}}
    responses: Json = {"200": {"description": operation.outcome}}
    if content:
        responses["200"]["content"] = content
    error = {"application/json": {"schema": _one_of([ERROR_OF[api] for api in operation.apis])}}
    if operation.apis:
        if operation.bodies or operation.may_miss:
            responses["4XX"] = {"description": "The request's fault.", "content": error}
        responses["5XX"] = {"description": "The model is not ready, or failed.", "content": error}
    return responses


def _one_of(schemas: list[Json]) -> Json:
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}


def _body_schemas() -> Json:
    _, whole = models_json_schema(
        [(model, "validation") for model in _BODIES], ref_template="#/components/schemas/{model}"
    )
    schemas: Json = whole["$defs"]
    for model in _BODIES:
        schema = schemas[model.__name__]
        # Further sentences are for those who read the code.
        schema["description"] = schema["description"].partition(". ")[0].rstrip(".") + "."
        required = schema.get("required", [])
        schema["properties"] = {
            name: _field(field, is_required=name in required)
            for name, field in schema["properties"].items()
        }
        schema["properties"] |= _other_names(model, schema["properties"])
        if issubclass(model, GenerationFields):
            refused = ", ".join(f"`{name}`" for name in sorted(NOT_SERVED))
            schema["description"] += f"\n\nRefused, because they are not served: {refused}."
    return schemas


def _field(field: Json, *, is_required: bool) -> Json:
    """A field without what says nothing, and with null where that means "not given"."""
    empty = {"title", "default"} if is_required else {"title"}
    field = {key: value for key, value in field.items() if key not in empty}
    choices = field.get("anyOf", [])
    if len(choices) == 2 and _NULL in choices:
        del field["anyOf"]
        field = choices[0] | field
    return field if is_required else _or_null(field)


def _or_null(field: Json) -> Json:
    if "anyOf" in field:
        return {**field, "anyOf": [*field["anyOf"], _NULL]}
    if "enum" in field:
        return {**field, "enum": [*field["enum"], None]}
    if "type" in field:
        return {**field, "type": [field["type"], "null"]}
    if "$ref" in field:
        rest = {key: value for key, value in field.items() if key != "$ref"}
        return {"anyOf": [{"$ref": field["$ref"]}, _NULL], **rest}
    return field  # anything, so null too


def _other_names(model: type[RequestBody], fields: Json) -> Json:
    """Fields under the older names that are still read."""
    others: Json = {}
    for field in model.model_fields.values():
        if isinstance(field.validation_alias, AliasChoices):
            first, *older = map(str, field.validation_alias.choices)
            others |= {name: {**fields[first], "deprecated": True} for name in older}
    return others
