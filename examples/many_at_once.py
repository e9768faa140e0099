"""Many requests at once, and what the fleet says about them.

Run: .venv/bin/python examples/many_at_once.py
`KVRELAY_URL` (http://127.0.0.1:8000) and `KVRELAY_API_KEY` (none) say where to and as whom.
"""

from __future__ import annotations

import asyncio

import httpx
from connection import KEY, URL, connect
from openai import AsyncOpenAI

WORDS = ("ability", "absence", "otter", "river", "able", "abnormal", "above", "accept")


async def main() -> None:
    """Sends all questions together; then asks the router who served the last one, and how full the workers are."""
    _, model = connect()
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as client:

        async def ask(word: str) -> tuple[str, str | None]:
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"What is the meaning of {word}?"}],
                temperature=0,
                max_tokens=60,
            )
            return answer.id, answer.choices[0].message.content

        answers = await asyncio.gather(*(ask(word) for word in WORDS))
    for word, (_, text) in zip(WORDS, answers, strict=True):
        print(f"{word}: {text}")

    async with httpx.AsyncClient(base_url=URL, headers={"authorization": f"Bearer {KEY}"}) as http:
        request = (await http.get(f"/requests/{answers[-1][0]}")).json()
        fleet = (await http.get("/fleet")).json()
    attempt = request["sequences"][0]["attempts"][-1]
    print(f"\nthe last one: prefill {attempt['prefill']}, decode {attempt['decode']}; {'; '.join(attempt['reasons'])}")
    for worker in fleet["workers"]:
        print(f"{worker['worker_id']}: {worker['blocks']['free']} of {worker['blocks']['total']} blocks free")


if __name__ == "__main__":
    asyncio.run(main())
