"""The web server with handlers that show what passes through instead of real text.

A body says what it wants: `ids` (one list of token ids per sequence), `max_tokens`, `stream`,
`boom` (how to fail). Tokens come back as numbers. `python -m tests.web_stand_in JSON` serves;
`tests.web_server` runs it for a test. Must not import what gevent would have to patch.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from container.web.invocations import Handlers
from handler.contract import Api, ApiError, EventSource, Usage
from handler.failures import failure
from handler.runner.protocol import Failed, Finished, Generate, Tokens


class StandInCall:
    """Token ids in, token ids out."""

    def __init__(self, api: Api, body: Any, stream: bool | None) -> None:
        if not isinstance(body, dict):
            raise ApiError(400, "an object is needed")
        self.boom = body.get("boom")
        if self.boom == "parse":
            raise KeyError("secret detail")
        if self.boom == "api":
            raise ApiError(404, "no such thing", param="ids", code="odd", kind="odd_kind")
        if self.boom == "recursion":
            raise RecursionError
        self.api = api
        self.stream = bool(body.get("stream")) if stream is None else stream
        self.done_marker = api == "openai"
        prompts = body.get("ids", [[1]])
        self.sequences = [Generate("", ids, body.get("max_tokens", 3)) for ids in prompts]
        self.usage = Usage(prompt_tokens=sum(map(len, prompts)), prompt_characters=7)

    def collect(self, events: EventSource) -> Any:
        found: dict[int, list[int]] = {}
        for index, event in events:
            found.setdefault(index, []).extend(self._tokens(event))
        return {"api": self.api, "tokens": [found[index] for index in sorted(found)]}

    def payloads(self, events: EventSource) -> Iterator[bytes]:
        yield b'{"role":"assistant"}'
        for index, event in events:
            tokens = self._tokens(event)
            if isinstance(event, Finished):
                yield json.dumps({"i": index, "finish": event.reason}).encode()
            else:
                yield json.dumps({"i": index, "t": tokens}).encode()

    def _tokens(self, event: Any) -> list[int]:
        if isinstance(event, Failed):
            raise failure(self.api, event)
        if self.boom == "generate":
            raise KeyError("secret detail")
        if isinstance(event, Finished):
            self.usage.finish_reasons.append(event.reason)
            self.usage.queue_s, self.usage.inference_s = event.queue_s, event.inference_s
        tokens = event.token_ids if isinstance(event, Tokens) else []
        self.usage.completion_tokens += len(tokens)
        return tokens


def handlers() -> Handlers:
    return Handlers(
        build_model=lambda card, settings: card,
        chat=lambda body, model: StandInCall("openai", body, None),
        completions=lambda body, model: StandInCall("openai", body, None),
        generate=lambda body, model: StandInCall("tgi", body, False),
        generate_stream=lambda body, model: StandInCall("tgi", body, True),
        compat=lambda body, model: StandInCall("tgi", body, None),
        tokenize=lambda body, model: [len(body["inputs"])],
        chat_tokenize=lambda body, model: {"tokenize_response": []},
        vllm_tokenize=lambda body, model: {"tokens": []},
        detokenize=lambda body, model: {"prompt": ""},
    )


if __name__ == "__main__":
    from container.web.server import main

    main(sys.argv[1], handlers)
