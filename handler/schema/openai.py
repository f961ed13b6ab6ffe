"""OpenAI's request bodies, with the extensions that vLLM's and TGI's users send.

Ranges are those of OpenAI's API reference. Fields that cannot change the text (`user`, `metadata`,
`store`, `service_tier`, …) are accepted and not read; fields that would change it and are not
served are refused by name.

Must not know: the model, templates, the runner.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema

from handler.contract import ApiError
from handler.schema.messages import (
    MESSAGES_FORM,
    TOOLS_FORM,
    Message,
    read_messages,
    read_tools,
)
from handler.schema.validation import Accepts, RequestBody, bad_value, read, refusal, with_hint

MAX_STOPS = 16
"""OpenAI allows 4; vLLM any number. More than 16 is no one's need, and each costs memory."""
MAX_STOP_LENGTH = 1024
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_stops(stops: list[str]) -> list[str]:
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise ValueError
    return stops


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    list[str],
    AfterValidator(_check_stops),
    BeforeValidator(
        _stop_list,
        json_schema_input_type=Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)],
    ),
    Accepts(
        f"a string or a list of up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"
    ),
]
Boolean = Annotated[bool, Accepts("true or false")]
Penalty = Annotated[float, Field(ge=-2, le=2), Accepts("a number from -2 to 2")]
Fraction = Annotated[float, Field(ge=0, le=1), Accepts("a number from 0 to 1")]
PositiveFraction = Annotated[
    float, Field(gt=0, le=1), Accepts("a number greater than 0 and at most 1")
]
PositiveCount = Annotated[int, Field(ge=1), Accepts("a whole number of at least 1")]
Count = Annotated[int, Field(ge=0), Accepts("a whole number of at least 0")]
Object = Annotated[dict[str, Any], Accepts("an object")]
Seed = Annotated[
    int, Field(ge=-(2**63), le=2**64 - 1), Accepts("a whole number that fits in 64 bits")
]

NOT_SERVED = {
    **dict.fromkeys(
        ("functions", "function_call"), "is OpenAI's deprecated form; use `tools` instead"
    ),
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "suffix",
            "audio",
            "web_search_options",
            "verbosity",
            "bad_words",
            "allowed_token_ids",
            "use_beam_search",
            "length_penalty",
            "watermark",
            "grammar",
            "adapter_id",
            "truncate",
            "tool_prompt",
            "logits_processors",
            "prompt_embeds",
            "return_tokens_as_token_ids",
        ),
        "is not supported; leave it out",
    ),
}
"""Known fields of these APIs that would change the answer, and what is said of them."""
NOT_SERVED_IN_CHAT = {"echo": "is a field of /v1/completions only; leave it out"}
"""vLLM takes it in chats too."""
NOT_READ = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prediction",
    "parallel_tool_calls",
    "modalities",
)
"""Known fields of these APIs that have no part in the text, or a check of their own."""


class StreamOptions(RequestBody):
    """`stream_options`."""

    include_usage: Boolean = False


class GenerationFields(RequestBody):
    """What chat and completions share."""

    also_known = frozenset({*NOT_SERVED, *NOT_SERVED_IN_CHAT, *NOT_READ})

    model: Annotated[str, Accepts("a string")] | None = None
    n: Annotated[
        int, Field(ge=1, le=MAX_CHOICES), Accepts(f"a whole number from 1 to {MAX_CHOICES}")
    ] = 1
    stream: Boolean = False
    stream_options: Annotated[
        StreamOptions, Accepts('an object such as {"include_usage": true}')
    ] = StreamOptions()
    stop: Stops = Field(default_factory=list)
    seed: Seed | None = None
    temperature: Annotated[float, Field(ge=0, le=2), Accepts("a number from 0 to 2")] | None = None
    top_p: Fraction = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        Accepts("an object of token ids with numbers from -100 to 100"),
    ] = Field(default_factory=dict)
    # Extensions
    top_k: Annotated[int, Field(ge=-1), Accepts("a whole number of at least -1 (-1, 0: off)")] = 0
    min_p: Fraction = 0.0
    typical_p: PositiveFraction = 1.0
    repetition_penalty: Annotated[
        float, Field(gt=0, le=100), Accepts("a number greater than 0 and at most 100")
    ] = 1.0
    do_sample: Boolean | None = None
    min_tokens: Count = 0
    ignore_eos: Boolean = False
    stop_token_ids: Annotated[list[int], Accepts("a list of token ids")] = Field(
        default_factory=list
    )
    skip_special_tokens: Boolean = True
    include_stop_str_in_output: Boolean = False
    truncate_prompt_tokens: (
        Annotated[
            Literal[-1] | Annotated[int, Field(ge=1)],
            Accepts("a whole number of at least 1, or -1 for as many as fit"),
        ]
        | None
    ) = None
    return_token_ids: Boolean = False
    prompt_logprobs: (
        Annotated[
            int,
            Field(ge=0, le=0),
            Accepts("0, for each prompt token's own log-probability (others are not available)"),
        ]
        | None
    ) = None
    response_format: Object = Field(default_factory=dict)


class ChatBody(GenerationFields):
    """`POST /v1/chat/completions`. `messages` and `tools` are checked by `read_chat`."""

    model_config = ConfigDict(json_schema_extra={"required": ["messages"]})

    messages: Annotated[Any, WithJsonSchema(MESSAGES_FORM)] = None
    tools: Annotated[Any, WithJsonSchema(TOOLS_FORM)] = None
    tool_choice: Annotated[Any, WithJsonSchema({"enum": ["none", "auto"]})] = None
    max_tokens: PositiveCount | None = None
    max_completion_tokens: PositiveCount | None = None
    logprobs: Boolean = False
    top_logprobs: Annotated[
        int,
        Field(ge=0, le=MAX_TOP_LOGPROBS),
        Accepts(f"a whole number from 0 to {MAX_TOP_LOGPROBS}"),
    ] = 0
    # Extensions
    add_generation_prompt: Boolean | None = None
    continue_final_message: Boolean | None = None
    chat_template: Annotated[str, Accepts("a string")] | None = None
    chat_template_kwargs: Object = Field(default_factory=dict)
    documents: Annotated[list[dict[str, Any]], Accepts("a list of objects")] | None = None
    reasoning_effort: Annotated[str, Accepts("a string")] | None = None
    # Templates write them; vLLM's reference, too, has this off for chats.
    add_special_tokens: Boolean = False

    @property
    def asked_tokens(self) -> int | None:
        """The budget; the newer of the two fields wins."""
        return self.max_completion_tokens or self.max_tokens


Prompt = str | list[int]
"""Text, or token ids."""
_IDS_FORM = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_FORM = {
    "description": "A text, texts, token ids, or lists of token ids.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS_FORM,
        {"type": "array", "items": _IDS_FORM, "minItems": 1},
    ],
}
"""As JSON Schema; `_read_prompts` checks it."""


class CompletionBody(GenerationFields):
    """`POST /v1/completions`. `prompt` is checked by `read_completion`."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})

    prompt: Annotated[Any, WithJsonSchema(PROMPT_FORM)] = None
    max_tokens: Count = 16
    logprobs: (
        Annotated[
            int,
            Field(ge=0, le=MAX_TOP_LOGPROBS),
            Accepts(f"a whole number from 0 to {MAX_TOP_LOGPROBS}"),
        ]
        | None
    ) = None
    echo: Boolean = False
    best_of: PositiveCount | None = None
    add_special_tokens: Boolean = True


def read_chat(body: Any) -> tuple[ChatBody, list[Message], list[dict[str, Any]] | None]:
    """The request, its messages, and the tools it offers. Raises ApiError."""
    request = read(ChatBody, body, "openai")
    _check_common(request, body)
    _refuse(NOT_SERVED_IN_CHAT, body)
    try:
        messages = read_messages(request.messages, "openai")
    except ApiError as error:
        raise with_hint(error, ChatBody, body) from None
    if request.top_logprobs and not request.logprobs:
        raise refusal("openai", "top_logprobs", "`top_logprobs` needs `logprobs` to be true")
    if request.add_generation_prompt and request.continue_final_message:
        sentence = "`continue_final_message` and `add_generation_prompt` exclude each other"
        raise refusal("openai", "continue_final_message", sentence)
    return request, messages, _offered_tools(request)


def read_completion(body: Any) -> tuple[CompletionBody, list[Prompt]]:
    """The request and its prompts. Raises ApiError."""
    request = read(CompletionBody, body, "openai")
    _check_common(request, body)
    try:
        return request, _read_prompts(request.prompt)
    except ApiError as error:
        raise with_hint(error, CompletionBody, body) from None


def _check_common(request: GenerationFields, body: dict[str, Any]) -> None:
    _refuse(NOT_SERVED, body)
    if request.prompt_logprobs is not None and request.stream:
        sentence = "`prompt_logprobs` is not available with `stream`"
        raise refusal("openai", "prompt_logprobs", sentence)
    kind = request.response_format.get("type", "text")
    if kind != "text":
        sentence = f'`response_format` of type {kind!r} is not supported yet; only "text" is'
        raise refusal("openai", "response_format", sentence)
    modalities = body.get("modalities")
    if modalities not in (None, ["text"]):
        raise bad_value("openai", "modalities", '["text"]', modalities)


def _refuse(fields: dict[str, str], body: dict[str, Any]) -> None:
    for field, sentence in fields.items():
        if body.get(field) not in (None, False, "", [], {}):
            raise refusal("openai", field, f"`{field}` {sentence}")


def _offered_tools(request: ChatBody) -> list[dict[str, Any]] | None:
    """The tools the model may see: none where it may call none."""
    tools = read_tools(request.tools, "openai")
    choice = request.tool_choice
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return None
    if choice != "required" and not isinstance(choice, dict):
        raise bad_value("openai", "tool_choice", '"none" or "auto"', choice)
    raise refusal(
        "openai",
        "tool_choice",
        '`tool_choice` that forces a call is not supported yet; use "auto" or "none"',
    )


def _read_prompts(prompt: Any) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if _is_ids(prompt):
            return [prompt]
        if all(isinstance(item, list) and item and _is_ids(item) for item in prompt):
            return prompt
    accepted = "a string, a list of strings, a list of token ids, or a list of such lists"
    raise bad_value("openai", "prompt", accepted, prompt)


def _is_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def check_token_ids(field: str, ids: list[int], vocab_size: int) -> None:
    """Raises ApiError where an id is not in the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            accepted = f"made of token ids from 0 to {vocab_size - 1}"
            raise bad_value("openai", field, accepted, token_id)


def read_logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    """The biases by token id. Raises ApiError."""
    read_bias: dict[int, float] = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or int(key[:12]) >= vocab_size:
            accepted = f"an object whose keys are token ids from 0 to {vocab_size - 1}"
            raise bad_value("openai", "logit_bias", accepted, key)
        read_bias[int(key)] = value
    return read_bias
