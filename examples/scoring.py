"""How likely the model finds texts: prompts are scored with `echo` and no token is generated.

Run: .venv/bin/python examples/scoring.py
`KVRELAY_URL` (http://127.0.0.1:8000) and `KVRELAY_API_KEY` (none) say where to and as whom.
"""

from __future__ import annotations

from connection import connect

QUESTION = "<|im_start|>user\nWhat is a river?<|im_end|>\n<|im_start|>assistant\n"
ANSWERS = (
    "a large natural stream of water",
    "a large natural stream of sand",
    "the quality of being able to perform",
)


def main() -> None:
    """Ranks answers to a question by the sum of their tokens' log-probabilities."""
    client, model = connect()

    scores = client.completions.create(
        model=model,
        prompt=[QUESTION + answer for answer in ANSWERS],
        max_tokens=0,
        echo=True,
        logprobs=0,
    )
    ranked = []
    for answer, choice in zip(ANSWERS, scores.choices, strict=True):
        given = choice.logprobs
        assert given is not None and given.text_offset is not None and given.token_logprobs is not None
        of_answer = [
            logprob
            for offset, logprob in zip(given.text_offset, given.token_logprobs, strict=True)
            if offset >= len(QUESTION) and logprob is not None  # the first token of a prompt has none
        ]
        ranked.append((sum(of_answer), answer))
    for score, answer in sorted(ranked, reverse=True):
        print(f"{score:9.3f}  {answer}")

    best = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is a river?"}],
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
    )
    given_in_chat = best.choices[0].logprobs
    for token in (given_in_chat and given_in_chat.content) or []:
        print(f"{token.token!r:12}", {top.token: round(top.logprob, 3) for top in token.top_logprobs})


if __name__ == "__main__":
    main()
