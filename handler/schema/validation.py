"""Reads a JSON body into a pydantic model; every fault becomes one sentence of the route's API.

The sentence names the field as the client wrote it and what it accepts.

Must not know: which fields there are, the model, HTTP beyond a status.
"""

import json
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from handler.contract import Api, ApiError

Body = TypeVar("Body", bound="RequestBody")


class RequestBody(BaseModel):
    """Base of all request models: strict types, unknown fields ignored, null means not given."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


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
    # TGI's own sentences name a parameter without the object it lies in.
    location = fault["loc"][1:] if api == "tgi" and len(fault["loc"]) > 1 else fault["loc"]
    field = path(location)
    if fault["type"] == "missing":
        accepted = _accepted(model, fault["loc"])
        raise refusal(api, field, f"`{field}` is required: {accepted}")
    # An object within the body has no annotation of its own; its fields have.
    accepted = "an object" if fault["type"] == "model_type" else fault["msg"]
    raise bad_value(api, field, accepted, fault["input"])


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
