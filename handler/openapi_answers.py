"""JSON Schemas of what the server answers. A test holds real answers against them.

Must not know: how answers are made, which route gives which.
"""

from typing import Any

from handler.contract import Api

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_NUMBER_OR_NULL: Json = {"type": ["number", "null"]}
_COUNT: Json = {"type": "integer", "minimum": 0}
_FLAG: Json = {"type": "boolean"}


def named(name: str) -> Json:
    """The schema of this name in the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: Json, optional: Json | None = None) -> Json:
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": list(required)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _frame(kind: str, choice: Json) -> Json:
    """What OpenAI's answers and chunks have in common."""
    return {
        "id": _TEXT,
        "object": {"const": kind},
        "created": _COUNT,
        "model": _TEXT,
        "system_fingerprint": _TEXT,
        "choices": _list(choice),
    }


_TOKEN_BYTES = {"token": _TEXT, "logprob": {"type": "number"}, "bytes": _list(_COUNT)}
_CHAT_LOGPROBS = _object(
    {
        "content": _list(_object({**_TOKEN_BYTES, "top_logprobs": _list(_object(_TOKEN_BYTES))})),
        "refusal": {"type": "null"},
    }
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": _list(_NUMBER_OR_NULL),
        "top_logprobs": _list(
            _or_null({"type": "object", "additionalProperties": {"type": "number"}})
        ),
        "text_offset": _list(_COUNT),
    }
)
_ENDINGS = ["stop", "length", "tool_calls"]
_CHAT_CHOICE = _object(
    {
        "index": _COUNT,
        "message": _object(
            {"role": {"const": "assistant"}, "content": _TEXT_OR_NULL, "refusal": _TEXT_OR_NULL}
        ),
        "logprobs": _or_null(_CHAT_LOGPROBS),
        "finish_reason": {"enum": _ENDINGS},
    }
)
_CHAT_DELTA = _object(
    {
        "index": _COUNT,
        "delta": _object({}, {"role": {"const": "assistant"}, "content": _TEXT_OR_NULL}),
        "logprobs": _or_null(_CHAT_LOGPROBS),
        "finish_reason": {"enum": [*_ENDINGS, None]},
    }
)


def _completion_choice(endings: list[str | None]) -> Json:
    return _object(
        {
            "index": _COUNT,
            "text": _TEXT,
            "logprobs": _or_null(_COMPLETION_LOGPROBS),
            "finish_reason": {"enum": endings},
        }
    )


_TOKEN = _object({"id": _COUNT, "text": _TEXT, "logprob": _NUMBER_OR_NULL, "special": _FLAG})
_ENDING = {
    "finish_reason": {"enum": ["length", "eos_token", "stop_sequence"]},
    "generated_tokens": _COUNT,
    "seed": {"type": ["integer", "null"]},
}
_SEQUENCE = {
    **_ENDING,
    "prefill": _list(_object({"id": _COUNT, "text": _TEXT, "logprob": _NUMBER_OR_NULL})),
    "tokens": _list(_TOKEN),
}
_TOP_TOKENS = {"top_tokens": _list(_list(_TOKEN))}
_LOSER = _object({"generated_text": _TEXT, **_SEQUENCE}, _TOP_TOKENS)
_INFO = {
    "model_id": _TEXT_OR_NULL,
    "max_concurrent_requests": _COUNT,
    "max_best_of": _COUNT,
    "max_stop_sequences": _COUNT,
    "max_input_tokens": {"type": ["integer", "null"]},
    "max_total_tokens": {"type": ["integer", "null"]},
    "version": _TEXT,
    "status": _TEXT,
}

ANSWERS: Json = {
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        }
    ),
    "ChatAnswer": _object({**_frame("chat.completion", _CHAT_CHOICE), "usage": named("Usage")}),
    "ChatChunk": _object(
        _frame("chat.completion.chunk", _CHAT_DELTA), {"usage": _or_null(named("Usage"))}
    ),
    "CompletionAnswer": _object(
        {
            **_frame("text_completion", _completion_choice(["stop", "length"])),
            "usage": named("Usage"),
        }
    ),
    "CompletionChunk": _object(
        _frame("text_completion", _completion_choice(["stop", "length", None])),
        {"usage": _or_null(named("Usage"))},
    ),
    "GenerateAnswer": _object(
        {"generated_text": _TEXT},
        {"details": _object(_SEQUENCE, {**_TOP_TOKENS, "best_of_sequences": _list(_LOSER)})},
    ),
    "GenerateAnswers": _list(named("GenerateAnswer")),
    "TokenEvent": _object(
        {
            "index": _COUNT,
            "token": _TOKEN,
            "generated_text": _TEXT_OR_NULL,
            "details": _or_null(_object({**_ENDING, "input_length": _COUNT})),
        },
        {"top_tokens": _list(_TOKEN)},
    ),
    "TokenList": _list(_object({"id": _COUNT, "text": _TEXT, "start": _COUNT, "stop": _COUNT})),
    "TokenIds": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_COUNT),
            "token_strs": _or_null(_list(_TEXT)),
        }
    ),
    "DetokenizedText": _object({"prompt": _TEXT}),
    "ChatTokens": _object({"tokenize_response": named("TokenList"), "templated_text": _TEXT}),
    "Model": _object(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": _TEXT,
            "max_model_len": {"type": ["integer", "null"]},
        }
    ),
    "ModelList": _object({"object": {"const": "list"}, "data": _list(named("Model"))}),
    "Info": _object(_INFO),
    "Document": {"type": "object"},
    "OpenAIError": _object(
        {
            "error": _object(
                {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
            )
        }
    ),
    "TgiError": _object({"error": _TEXT, "error_type": _TEXT}),
}

ERROR_OF: dict[Api, Json] = {"openai": named("OpenAIError"), "tgi": named("TgiError")}
