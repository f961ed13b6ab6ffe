"""A chat request's messages as the text the model reads: which template, and what it is given.

Must not know: token ids, the answer, HTTP.
"""

from typing import Any

from handler.contract import ApiError
from handler.schema.messages import Message
from handler.schema.openai import ChatBody
from handler.schema.validation import refusal
from handler.served_model import ServedModel
from handler.template import ChatTemplate, TemplateRefusal

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
"""Template variables that have fields of their own."""


def render_chat(
    request: ChatBody,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    model: ServedModel,
) -> str:
    """The prompt text. Raises TemplateRefusal, and ApiError for a field that cannot be served."""
    template = _chosen_template(request, model, with_tools=tools is not None)
    messages = [_as_template_takes_it(message, template) for message in messages]
    continues = _continues(request, messages)

    def render(some_messages: list[Message]) -> str:
        return template.render(
            some_messages,
            tools=tools,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            variables=_variables(request, template),
        )

    try:
        return render(messages)
    except TemplateRefusal as first:
        # A message that calls tools may have no content, which templates written before tools
        # add to a string. Only where one cannot do without is it given an empty content.
        filled = [{"content": "", **message} for message in messages]
        if filled == messages:
            raise
        try:
            return render(filled)
        except TemplateRefusal:
            raise first from None


def render_openai_chat(
    request: ChatBody,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    model: ServedModel,
) -> str:
    """The same, for OpenAI's routes: a template's refusal, too, is an ApiError (400)."""
    try:
        return render_chat(request, messages, tools, model)
    except TemplateRefusal as refused:
        sentence = f"The chat template cannot render these messages: {refused}"
        message = sentence if sentence.endswith(".") else sentence + "."
        raise ApiError(400, message, param="messages", kind="template_error") from refused


def _chosen_template(request: ChatBody, model: ServedModel, *, with_tools: bool) -> ChatTemplate:
    given = request.chat_template
    if given is None:
        return model.chat_template(with_tools=with_tools)
    if model.has_chat_template(given):
        return model.chat_template(given)
    if not model.limits.allow_request_template:
        sentence = (
            "`chat_template` may only name one of the model's own templates; templates in requests "
            "are not allowed here"
        )
        raise refusal("openai", "chat_template", sentence)
    try:
        return ChatTemplate(given, model.card.special_tokens)
    except ValueError as error:
        raise TemplateRefusal(f"`chat_template` does not compile: {error}") from error


def _as_template_takes_it(message: Message, template: ChatTemplate) -> Message:
    message = dict(message)
    if message["role"] == "developer" and not template.mentions("developer"):
        message["role"] = "system"  # OpenAI's newer name for it, which older templates refuse
    if "content" in message:
        message["content"] = template.forms(message["role"]).fitted(message["content"])
    return message


def _continues(request: ChatBody, messages: list[Message]) -> bool:
    """Whether the model goes on with the last message: as asked, else as TGI does."""
    if request.continue_final_message is not None:
        return request.continue_final_message
    if request.add_generation_prompt is not None:
        return False
    last = messages[-1]
    return last["role"] == "assistant" and bool(last.get("content")) and "tool_calls" not in last


def _variables(request: ChatBody, template: ChatTemplate) -> dict[str, Any]:
    for name in RESERVED:
        if name in request.chat_template_kwargs:
            sentence = f"`chat_template_kwargs` cannot set `{name}`; give it as a field of its own"
            raise refusal("openai", "chat_template_kwargs", sentence)
    variables = dict(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        if not template.mentions("reasoning_effort"):
            sentence = "`reasoning_effort` has no effect on this model; leave it out"
            raise refusal("openai", "reasoning_effort", sentence)
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return variables
