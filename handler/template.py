"""Chat templates: messages to prompt text, exactly as transformers' `apply_chat_template` does.

A template is code from whoever uploaded the weights: it runs in jinja2's immutable sandbox, sees
only JSON values, and its output is bounded. Whatever it raises becomes a `TemplateRefusal`.

Must not know: the API a request came by, token ids, transformers itself.
"""

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.exceptions import TemplateError

from handler.template_forms import Forms, content_forms
from handler.template_sandbox import MAX_OUTPUT_CHARACTERS, compiled, start_clock

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


class TemplateRefusal(Exception):  # noqa: N818 - the template says no; nothing of ours failed
    """The template cannot render this conversation. The message is for the client."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are what every rendering has besides its own variables.

        Raises ValueError with line and reason where the source does not compile.
        """
        self.source = source
        self._special_tokens = special_tokens or {}
        try:
            self._template = compiled(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        self._forms = content_forms(self._rendered_or_none)

    def forms(self, role: str) -> Forms:
        """The forms of content that the template takes from this role."""
        return self._forms.get(role, self._forms["user"])

    def _rendered_or_none(self, messages: list[Message]) -> str | None:
        try:
            return self.render(messages)
        except TemplateRefusal:
            return None

    def mentions(self, word: str) -> bool:
        """Whether the word occurs in the source: if not, the template cannot make use of it."""
        return word in self.source

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text.

        `variables` are the request's own and go before special tokens of the same name. With
        `continue_final_message` the prompt ends inside the last message, so that the model goes on
        with it. Raises TemplateRefusal.
        """
        messages = [_with_reasoning_names(message) for message in messages]
        ending = ""
        if continue_final_message:
            ending = self._tag_ending(messages)
        context = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(context)
        return _cut_at_tag(text, ending) if continue_final_message else text

    def _run(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        start_clock()
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT_CHARACTERS:
                    break
        except TemplateError as error:
            raise TemplateRefusal(error.message or type(error).__name__) from error
        except Exception as error:  # a template can raise anything Python can
            raise TemplateRefusal(f"{type(error).__name__}: {error}") from error
        if size > MAX_OUTPUT_CHARACTERS:
            raise TemplateRefusal(f"it wrote more than {MAX_OUTPUT_CHARACTERS} characters")
        return "".join(pieces)

    def _tag_ending(self, messages: list[Message]) -> str:
        """Mark the end of the last message's text; that text."""
        content = messages[-1].get("content") if messages else None
        if content is None:
            raise TemplateRefusal("the final message has no content to continue")
        if not self.mentions("content"):
            raise TemplateRefusal("it does not use the content of messages, so none can continue")
        last = dict(messages[-1])
        if isinstance(content, str):
            last["content"] = content + CONTINUE_TAG
        else:
            parts = [dict(part) for part in content]
            part = next((part for part in reversed(parts) if "text" in part), None)
            if part is None:
                raise TemplateRefusal("the final message has no text to continue")
            content = part["text"]
            part["text"] += CONTINUE_TAG
            last["content"] = parts
        messages[-1] = last
        return str(content)


def _cut_at_tag(text: str, ending: str) -> str:
    tag = CONTINUE_TAG.strip()
    place = text.rfind(tag)
    if place < 0 or ending.strip() not in text:
        raise TemplateRefusal(
            "the final message cannot be continued, because the template changes or drops it"
        )
    # A template that trimmed the message trimmed the tag's space as well; then trim ours too.
    kept = text[:place]
    return kept if text.startswith(CONTINUE_TAG, place) else kept.rstrip()


def _with_reasoning_names(message: Message) -> Message:
    """Without null keys; reasoning under every name that templates read it by."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in REASONING_FIELDS if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message
