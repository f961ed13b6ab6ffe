"""A streamed chat with OpenAI's client, with log-probabilities and the usage at its end.

    python examples/openai_stream.py [BASE_URL]

`pip install openai`. The address is the server's, without `/v1`.
"""

import sys

from openai import OpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"

client = OpenAI(base_url=f"{BASE_URL}/v1", api_key="unused")
stream = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": "What is deep learning?"}],
    max_tokens=60,
    logprobs=True,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"top_k": 40, "repetition_penalty": 1.1},  # fields that OpenAI's API has not
)

logprobs = []
for chunk in stream:
    if chunk.usage is not None:  # the last chunk; it has no choices
        print("\nUsage:", chunk.usage)
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
        if choice.logprobs is not None:
            logprobs += [entry.logprob for entry in choice.logprobs.content or []]
        if choice.finish_reason is not None:
            print("\nEnded by:", choice.finish_reason)
print("Mean log-probability of a token:", sum(logprobs) / max(1, len(logprobs)))
