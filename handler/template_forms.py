"""Finds out which form of content a chat template can take, by giving it both.

A syntax tree shows that a template walks parts, but not for which roles: many walk the user's
parts and print the system's as they are. So each role is tried once with a text and with parts,
and what arrives in the prompt decides.

Must not know: jinja2, requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Render = Callable[[list[dict[str, Any]]], str | None]
"""Messages to prompt text, or None where the template refuses them."""

_WORDS = ("first-probe", "second-probe")
_PARTS = [{"type": "text", "text": word} for word in _WORDS]
_ASKS = {"role": "user", "content": "x"}
_ANSWERS = {"role": "assistant", "content": "y"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


@dataclass(frozen=True)
class Forms:
    """The forms of content in which a template shows all of a message's text."""

    text: bool
    parts: bool

    def fitted(self, content: Any) -> Any:
        """The content in a form that the template can take; as it is where both or neither work.

        Parts are joined without a separator, as templates that walk them do, and as TGI does.
        """
        if isinstance(content, list) and not self.parts:
            return "".join(part[part["type"]] for part in content)
        if isinstance(content, str) and self.parts and not self.text:
            return [{"type": "text", "text": content}]
        return content


def content_forms(render: Render) -> dict[str, Forms]:
    """What the template takes, by role."""
    return {role: _forms(render, role) for role in ("system", "user", "assistant", "tool")}


def _forms(render: Render, role: str) -> Forms:
    text = render(_conversation(role, "".join(_WORDS))) or ""
    parts = render(_conversation(role, _PARTS)) or ""
    return Forms(
        text="".join(_WORDS) in text,
        # A list that is printed shows its keys; one that is walked shows only the words.
        parts=all(word in parts for word in _WORDS) and "'type'" not in parts,
    )


def _conversation(role: str, content: Any) -> list[dict[str, Any]]:
    message = {"role": role, "content": content}
    if role == "system":
        return [message, _ASKS]
    if role == "user":
        return [message]
    if role == "assistant":
        return [_ASKS, message, _ASKS]
    return [_ASKS, _CALLS, {**message, "tool_call_id": _CALL["id"], "name": "f"}]
