"""Several chats at once with OpenAI's asynchronous client: the server batches them.

    python examples/openai_async.py [BASE_URL]

`pip install openai`. The address is the server's, without `/v1`.
"""

import asyncio
import sys

from openai import AsyncOpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"
QUESTIONS = ("What is a verb?", "What is a noun?", "What is rain?", "What is snow?")


async def ask(client: AsyncOpenAI, question: str) -> str:
    """The answer to one question."""
    answer = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        max_tokens=40,
    )
    return answer.choices[0].message.content or ""


async def main() -> None:
    """Ask all questions at the same time, print the answers in order."""
    async with AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="unused") as client:
        answers = await asyncio.gather(*(ask(client, question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(question, "->", answer)


asyncio.run(main())
