"""`POST /tokenize`, `/chat_tokenize` and `/detokenize`: what the model reads, without generating.

`/tokenize` has two forms, TGI's (`inputs`) and vLLM's (`prompt` or `messages`).

Must not know: Flask, the runner, sequences.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tokenizers import Encoding

from handler.contract import Api, ApiError
from handler.conversation import render_chat, render_openai_chat
from handler.schema.openai import check_token_ids, read_chat
from handler.schema.tgi import TokenizeBody
from handler.schema.validation import read, refusal
from handler.schema.vllm import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from handler.served_model import ServedModel
from handler.template import TemplateRefusal

MIN_BOUND = 1_000_000
BOUND_PER_TOKEN = 16


def tokenize(body: Any, model: ServedModel) -> list[dict[str, Any]]:
    """TGI's token list of `inputs`, special tokens added. Raises ApiError (422).

    `start` and `stop` are offsets in UTF-8 bytes, as TGI's are; added tokens have none of the text.
    """
    text = read(TokenizeBody, body, "tgi").inputs
    return _rows(text, _encoding("tgi", "inputs", text, model, add_special_tokens=True))


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
    encoding = _encoding("tgi", "messages", text, model, add_special_tokens=False)
    return {"tokenize_response": _rows(text, encoding), "templated_text": text}


def vllm_tokenize(body: Any, model: ServedModel) -> dict[str, Any]:
    """vLLM's answer: the ids of `prompt` or of rendered `messages`. Raises ApiError (400).

    Special tokens are added to a prompt and not to messages, whose template writes its own, unless
    `add_special_tokens` says otherwise.
    """
    request: TokenizeChatBody | TokenizeTextBody
    if isinstance(body, dict) and "messages" in body:
        request, part = read(TokenizeChatBody, body, "openai"), "messages"
        chat = {name: value for name, value in body.items() if name != "return_token_strs"}
        text = render_openai_chat(*read_chat(chat), model)
    else:
        request, part = read(TokenizeTextBody, body, "openai"), "prompt"
        text = request.prompt
    adds = request.add_special_tokens
    encoding = _encoding("openai", part, text, model, add_special_tokens=adds)
    return {
        "count": len(encoding.ids),
        "max_model_len": model.card.max_total_tokens,
        "tokens": encoding.ids,
        "token_strs": encoding.tokens if request.return_token_strs else None,
    }


def detokenize(body: Any, model: ServedModel) -> dict[str, Any]:
    """vLLM's answer: the text of `tokens`, special tokens shown. Raises ApiError (400)."""
    ids = read(DetokenizeBody, body, "openai").tokens
    bound = _bound(model)
    if len(ids) > bound:
        raise refusal("openai", "tokens", f"`tokens` may hold up to {bound} ids, not {len(ids)}")
    check_token_ids("tokens", ids, model.card.vocab_size)
    detokenizer = model.vocabulary.detokenizer(skip_special_tokens=False)
    return {"prompt": "".join(map(detokenizer.push, ids)) + detokenizer.flush()}


def _bound(model: ServedModel) -> int:
    """Characters or ids in one request: far more than the context holds, so that a text that is too
    long can still be counted, and few enough to be answered within seconds."""
    return max(MIN_BOUND, BOUND_PER_TOKEN * model.card.max_total_tokens)


def _encoding(
    api: Api, field: str, text: str, model: ServedModel, *, add_special_tokens: bool
) -> Encoding:
    bound = _bound(model)
    if len(text) > bound:
        sentence = f"`{field}` may hold up to {bound} characters, not {len(text)}"
        raise refusal(api, field, sentence)
    try:
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (UnicodeEncodeError, TypeError) as error:
        sentence = (
            f"`{field}` holds half of a surrogate pair (\\ud800 to \\udfff), which is no text"
        )
        raise refusal(api, field, sentence) from error


def _rows(text: str, encoding: Encoding) -> list[dict[str, Any]]:
    at_byte: Sequence[int] = range(len(text) + 1)
    if not text.isascii():
        at_byte = list(accumulate((len(letter.encode()) for letter in text), initial=0))
    return [
        {"id": token_id, "text": text[start:stop], "start": at_byte[start], "stop": at_byte[stop]}
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
