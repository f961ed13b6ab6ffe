"""Chat and TGI's text generation with Hugging Face's client, plain and streamed.

    python examples/huggingface_hub_client.py [BASE_URL]

`pip install huggingface_hub`.
"""

import sys

from huggingface_hub import InferenceClient

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
MESSAGES = [{"role": "user", "content": "What is deep learning?"}]
PROMPT = "The capital of France is"

client = InferenceClient(BASE_URL)

answer = client.chat_completion(MESSAGES, max_tokens=40)
print("Chat:", answer.choices[0].message.content)

print("Chat, streamed:", end=" ")
for chunk in client.chat_completion(MESSAGES, max_tokens=40, stream=True):
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()

print("Text:", client.text_generation(PROMPT, max_new_tokens=10, return_full_text=False))

described = client.text_generation(PROMPT, max_new_tokens=10, details=True, seed=1, do_sample=True)
print("With details:", repr(described.generated_text))
print("  ended by", described.details.finish_reason, "with seed", described.details.seed)
for token in described.details.tokens:
    print("  ", token.id, repr(token.text), token.logprob)

print("Token by token:")
for event in client.text_generation(PROMPT, max_new_tokens=10, details=True, stream=True):
    print("  ", event.index, repr(event.token.text))
    if event.details is not None:
        print("  ended by", event.details.finish_reason, "after", repr(event.generated_text))
