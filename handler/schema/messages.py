"""The messages and tools of a chat request, checked for form and otherwise left as they came.

They stay plain JSON, because a template may read any key of them.

Must not know: templates, tokens, the model.
"""

import json
from typing import Any

from handler.contract import Api
from handler.schema.validation import bad_value, path, refusal

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROLES_IN_WORDS = "one of " + ", ".join(f'"{role}"' for role in ROLES)
_CONTENT = 'a string or a list of parts such as {"type": "text", "text": "…"}'
_FUNCTION_FORM = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
}
_PART_FORM = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CALL_FORM = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "function": _FUNCTION_FORM},
    "required": ["function"],
}
_CONTENT_FORMS = [{"type": "string"}, {"type": "array", "items": _PART_FORM}]
_MESSAGE_FIELDS = {
    "name": {"type": ["string", "null"]},
    "tool_call_id": {"type": ["string", "null"]},
}
_MESSAGE_FORM = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": _CONTENT_FORMS},
                **_MESSAGE_FIELDS,
            },
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "properties": {
                "role": {"const": "assistant"},
                "content": {"anyOf": [*_CONTENT_FORMS, {"type": "null"}]},
                "tool_calls": {"type": "array", "items": _CALL_FORM, "minItems": 1},
                **_MESSAGE_FIELDS,
            },
            "required": ["role", "tool_calls"],
        },
    ]
}
MESSAGES_FORM = {
    "description": "The conversation. A last message of the assistant is continued.",
    "type": "array",
    "items": _MESSAGE_FORM,
    "minItems": 1,
}
"""What `read_messages` accepts, as JSON Schema."""
TOOLS_FORM = {
    "description": "What the model may call; the chat template shows it to the model.",
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": _FUNCTION_FORM},
        "required": ["function"],
    },
}
"""What `read_tools` accepts, as JSON Schema."""
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "reasoning_content", "reasoning")
"""What an assistant's message may have in place of content."""


def read_messages(messages: Any, api: Api) -> list[Message]:
    """The messages without null fields, tool-call arguments as objects. Raises ApiError."""
    if not isinstance(messages, list) or not messages:
        raise bad_value(
            api, "messages", "a non-empty list of objects with `role` and `content`", messages
        )
    return [_read_message(message, place, api) for place, message in enumerate(messages)]


def _read_message(given: Any, place: int, api: Api) -> Message:
    where = ("messages", place)
    if not isinstance(given, dict):
        raise bad_value(api, path(where), "an object with `role` and `content`", given)
    message: Message = {key: value for key, value in given.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise bad_value(api, path((*where, "role")), _ROLES_IN_WORDS, role)
    content = message.get("content")
    if content is None:
        if role != "assistant" or not any(message.get(key) for key in _INSTEAD_OF_CONTENT):
            raise bad_value(api, path((*where, "content")), _CONTENT, None)
    elif isinstance(content, list):
        for part_place, part in enumerate(content):
            _check_part(part, (*where, "content", part_place), api)
    elif not isinstance(content, str):
        raise bad_value(api, path((*where, "content")), _CONTENT, content)
    if "tool_calls" in message:
        message["tool_calls"] = _read_tool_calls(message["tool_calls"], where, api)
    return message


def _check_part(part: Any, where: tuple[int | str, ...], api: Api) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_value(api, path(where), 'an object such as {"type": "text", "text": "…"}', part)
    kind = part["type"]
    if kind not in ("text", "refusal"):
        sentence = (
            f"`{path(where)}` has type `{kind}`, but this model takes parts of type text only"
        )
        raise refusal(api, path(where), sentence)
    if not isinstance(part.get(kind), str):
        raise bad_value(api, path((*where, kind)), "a string", part.get(kind))


def _read_tool_calls(calls: Any, where: tuple[int | str, ...], api: Api) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_value(api, path((*where, "tool_calls")), "a list of tool calls", calls)
    read: list[dict[str, Any]] = []
    for place, call in enumerate(calls):
        here = (*where, "tool_calls", place)
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            form = 'an object such as {"id", "type": "function", "function": {"name", "arguments"}}'
            raise bad_value(api, path(here), form, call)
        read.append({**call, "function": _with_object_arguments(function)})
    return read


def _with_object_arguments(function: dict[str, Any]) -> dict[str, Any]:
    """OpenAI writes arguments as JSON text; templates are written for objects."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        value = json.loads(arguments or "{}")
    except ValueError:  # a model may have written anything; the template gets it as it is
        return function
    return {**function, "arguments": value} if isinstance(value, dict) else function


def read_tools(tools: Any, api: Api) -> list[dict[str, Any]] | None:
    """The tools, or None where there are none. Raises ApiError."""
    if tools is None or tools == []:
        return None
    form = 'an object such as {"type": "function", "function": {"name": "…", "parameters": {…}}}'
    if not isinstance(tools, list):
        raise bad_value(api, "tools", "a list of tools", tools)
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_value(api, path(("tools", place)), form, tool)
        if tool.get("type", "function") != "function":
            raise bad_value(api, path(("tools", place, "type")), '"function"', tool["type"])
    return tools
