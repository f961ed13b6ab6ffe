"""Server-sent events read by hand, with nothing but requests.

    python examples/requests_sse.py [BASE_URL]

`pip install requests`. What to mind: a refusal has its status before the stream begins; a failure
after that is an event with an `error`; lines that begin with a colon only keep the connection open.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import requests

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"


def events(path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer. Raises RuntimeError with the server's own sentence."""
    with requests.post(f"{BASE_URL}{path}", json=body, stream=True, timeout=300) as answer:
        if answer.status_code != 200:
            raise RuntimeError(answer.text)
        for line in answer.iter_lines():
            data = line.removeprefix(b"data: ")
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"])
            yield event


print("OpenAI's shape:", end=" ")
chat = {"messages": [{"role": "user", "content": "What is deep learning?"}], "max_tokens": 40}
for event in events("/invocations", {**chat, "stream": True}):
    for choice in event["choices"]:
        print(choice["delta"].get("content") or "", end="", flush=True)
print()

print("TGI's shape:", end=" ")
text = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 10}}
for event in events("/generate_stream", text):
    print(event["token"]["text"], end="", flush=True)
    if event["generated_text"] is not None:
        print("\nThe whole:", event["generated_text"])

try:
    list(events("/generate_stream", {"inputs": ""}))
except RuntimeError as error:
    print("Refused, as it should be:", error)
