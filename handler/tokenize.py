"""`POST /tokenize` and `/chat_tokenize`: what the model would read, without generating.

Must not know: Flask, the runner, sequences.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tokenizers import Encoding

from handler.contract import ApiError
from handler.conversation import render_chat
from handler.schema.openai import read_chat
from handler.schema.tgi import TokenizeBody
from handler.schema.validation import read, refusal
from handler.served_model import ServedModel
from handler.template import TemplateRefusal


def tokenize(body: Any, model: ServedModel) -> list[dict[str, Any]]:
    """TGI's token list of `inputs`, special tokens added. Raises ApiError (422).

    `start` and `stop` are offsets in UTF-8 bytes, as TGI's are; added tokens have none of the text.
    """
    request = read(TokenizeBody, body, "tgi")
    return _token_list(request.inputs, model, add_special_tokens=True)


def chat_tokenize(body: Any, model: ServedModel) -> dict[str, Any]:
    """The rendered text of a chat request and its tokens. Raises ApiError (422)."""
    try:
        request, messages, tools = read_chat(body)
        text = render_chat(request, messages, tools, model)
    except TemplateRefusal as error:
        raise ApiError(422, f"Template error: {error}", kind="template_error") from error
    except ApiError as error:
        message = f"Input validation error: {error.message}"
        raise ApiError(422, message, param=error.param) from error
    tokens = _token_list(text, model, add_special_tokens=False)
    return {"tokenize_response": tokens, "templated_text": text}


def _token_list(text: str, model: ServedModel, *, add_special_tokens: bool) -> list[dict[str, Any]]:
    try:
        encoding = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (UnicodeEncodeError, TypeError) as error:
        sentence = "the text holds half of a surrogate pair (\\ud800 to \\udfff), which is no text"
        raise refusal("tgi", "inputs", sentence) from error
    return _rows(text, encoding)


def _rows(text: str, encoding: Encoding) -> list[dict[str, Any]]:
    at_byte: Sequence[int] = range(len(text) + 1)
    if not text.isascii():
        at_byte = list(accumulate((len(letter.encode()) for letter in text), initial=0))
    return [
        {"id": token_id, "text": text[start:stop], "start": at_byte[start], "stop": at_byte[stop]}
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
