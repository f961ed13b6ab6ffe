"""A chat with OpenAI's client.

    python examples/openai_sync.py [BASE_URL]

`pip install openai`. The address is the server's, without `/v1`.
"""

import sys

import openai

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"

client = openai.OpenAI(base_url=f"{BASE_URL}/v1", api_key="unused")

model = client.models.list().data[0].id
print("Model:", model)

answer = client.chat.completions.create(
    model=model,
    messages=[
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "What is deep learning?"},
    ],
    max_completion_tokens=60,
    temperature=0.7,
    seed=1,
)
print("Chat:", answer.choices[0].message.content)
print("Ended by:", answer.choices[0].finish_reason, answer.usage)

completion = client.completions.create(
    model=model, prompt="The capital of France is", max_tokens=10, temperature=0
)
print("Completion:", completion.choices[0].text)

try:
    client.chat.completions.create(model=model, messages=[], max_tokens=1)
except openai.BadRequestError as error:
    print("Refused, as it should be:", error.message)
