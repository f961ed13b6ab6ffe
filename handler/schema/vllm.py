"""vLLM's request bodies of `/tokenize` and `/detokenize`.

Must not know: the model, the runner.
"""

from typing import Annotated

from pydantic import Field

from handler.schema.openai import Boolean, ChatBody
from handler.schema.validation import Accepts, RequestBody


class TokenizeTextBody(RequestBody):
    """`POST /tokenize` with a text."""

    prompt: Annotated[str, Accepts("a string")]
    add_special_tokens: Boolean = True
    return_token_strs: Boolean = False


class TokenizeChatBody(ChatBody):
    """`POST /tokenize` with a chat."""

    return_token_strs: Boolean = False


class DetokenizeBody(RequestBody):
    """`POST /detokenize`."""

    tokens: Annotated[
        list[Annotated[int, Field(ge=0)]], Accepts("a list of token ids, none negative")
    ]
