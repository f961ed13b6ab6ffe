"""Reads a JSON body into a pydantic model; every fault becomes one sentence of the route's API.

The sentence names the field as the client wrote it and what it accepts.

Must not know: which fields there are, the model, HTTP beyond a status.
"""

import json
from functools import cache
from typing import Any, ClassVar, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from handler.contract import Api, ApiError
from handler.schema import unknown_fields

Body = TypeVar("Body", bound="RequestBody")


class RequestBody(BaseModel):
    """Base of all request models: strict types, unknown fields ignored, null means not given."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    also_known: ClassVar[frozenset[str]] = frozenset()
    """Fields that need no reading here, and are no mistake of the client."""

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        unknown_fields.note(body, _names(cls), cls.also_known)
        return {name: value for name, value in body.items() if value is not None}


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """All names that the model's fields may be given by."""
    names: set[str] = set()
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        names.update(map(str, alias.choices) if isinstance(alias, AliasChoices) else {name})
    return frozenset(names)


class Accepts:
    """Annotation of a field: what it accepts, in words that complete "`field` must be …"."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "description": f"Must be {self.what}."}

    def _check(self, value: Any, inner: core_schema.ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValueError as error:  # pydantic's ValidationError is one
            raise PydanticCustomError("accepts", "{what}", {"what": self.what}) from error


def read(model: type[Body], body: Any, api: Api) -> Body:
    """The body as an instance of `model`. Raises ApiError for the first fault."""
    if not isinstance(body, dict):
        raise refusal(api, None, f"The body must be a JSON object, not {shown(body)}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    raise with_hint(_refusal_of(fault, model, api), model, body)


def with_hint(error: ApiError, model: type[RequestBody], body: dict[str, Any]) -> ApiError:
    """The error, with a word on a field of the body that looks misspelt."""
    hint = unknown_fields.hint(body, _names(model), model.also_known)
    if hint:
        error.message = f"{error.message.removesuffix('.')}. {hint}"
    return error


def _refusal_of(fault: ErrorDetails, model: type[RequestBody], api: Api) -> ApiError:
    # TGI's own sentences name a parameter without the object it lies in.
    location = fault["loc"][1:] if api == "tgi" and len(fault["loc"]) > 1 else fault["loc"]
    field = path(location)
    if fault["type"] == "missing":
        accepted = _accepted(model, fault["loc"])
        return refusal(api, field, f"`{field}` is required: {accepted}")
    # An object within the body has no annotation of its own; its fields have.
    accepted = "an object" if fault["type"] == "model_type" else fault["msg"]
    return bad_value(api, field, accepted, fault["input"])


def bad_value(api: Api, field: str, accepted: str, value: Any) -> ApiError:
    """The error "`field` must be …"."""
    sentence = f"`{field}` must be {accepted}"
    if api == "openai":
        sentence += f", not {shown(value)}"
    elif isinstance(value, (str, dict, list, bool)):
        sentence += f". Given: {shown(value)}"
    return refusal(api, field, sentence)


def refusal(api: Api, field: str | None, sentence: str) -> ApiError:
    """The error of an invalid request: 400 on OpenAI's routes, 422 on TGI's."""
    if api == "openai":
        return ApiError(400, sentence + ".", param=field)
    return ApiError(422, f"Input validation error: {sentence}", param=field)


def path(location: tuple[int | str, ...]) -> str:
    """`("messages", 1, "role")` as `messages[1].role`."""
    text = ""
    for step in location:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def shown(value: Any) -> str:
    """A value as it may be repeated in a sentence: as JSON, and short."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _accepted(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """What the field at `location` accepts, where its annotation says so."""
    field = model.model_fields.get(str(location[0]))
    metadata = field.metadata if field is not None and len(location) == 1 else []
    return next((note.what for note in metadata if isinstance(note, Accepts)), "a value")
