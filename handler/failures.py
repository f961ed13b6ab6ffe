"""The sentences for what cannot be served: a prompt too long, a runner that failed.

Must not know: schemas, templates, HTTP beyond a status.
"""

from handler.contract import Api, ApiError
from handler.runner.protocol import Failed, ModelCard


def failure(api: Api, event: Failed) -> ApiError:
    """What the client is told of a sequence the runner could not produce."""
    tgi = api == "tgi"
    if event.kind in ("invalid", "too_long"):
        if tgi:
            return ApiError(422, f"Input validation error: {event.message}")
        code = "context_length_exceeded" if event.kind == "too_long" else None
        return ApiError(400, event.message, code=code)
    if event.kind == "overloaded":
        return ApiError(429, "Model is overloaded" if tgi else event.message, kind="overloaded")
    if event.kind == "unavailable":
        return ApiError(503, event.message, kind="unavailable")
    if tgi:
        message = f"Request failed during generation: {event.message}"
        return ApiError(424, message, kind="generation")
    return ApiError(500, event.message, kind="generation")


class PromptTooLong(Exception):  # noqa: N818 - a finding; each API words its own error
    """Raised before tokenising: so many characters cannot fit, whatever the tokens."""

    def __init__(self, num_characters: int) -> None:
        super().__init__(f"{num_characters} characters")
        self.num_characters = num_characters


class NotText(Exception):  # noqa: N818 - a finding; each API words its own error
    """The string holds half of a surrogate pair, so no encoding of it exists."""


def long_prompt(part: str, card: ModelCard, size: str) -> ApiError:
    """OpenAI's error for a prompt that is too long or leaves no room for an answer.

    `part`: "messages" or "prompt". `size`: for example "resulted in 9000 tokens".
    """
    of_which = ""
    if card.max_input_tokens < card.max_total_tokens - 1:
        of_which = f", of which the prompt may take {card.max_input_tokens}"
    return ApiError(
        400,
        f"This model's maximum context length is {card.max_total_tokens} tokens{of_which}. "
        f"However, your {part} {size}. Please reduce the length of the {part}.",
        param=part,
        code="context_length_exceeded",
    )


def long_answer(part: str, card: ModelCard, prompt_tokens: int, new_tokens: int) -> ApiError:
    """OpenAI's error for a prompt that fits and an answer that does not."""
    return ApiError(
        400,
        f"This model's maximum context length is {card.max_total_tokens} tokens. However, you "
        f"requested {prompt_tokens + new_tokens} tokens ({prompt_tokens} in the {part}, "
        f"{new_tokens} in the completion). Please reduce the length of the {part} or completion.",
        param=part,
        code="context_length_exceeded",
    )
