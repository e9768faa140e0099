"""Generation without services: the engine in this process.

Run: .venv/bin/python examples/offline.py
"""

from __future__ import annotations

from kvrelay import LLM, SamplingParams


def main() -> None:
    """Answers a list of prompts; then steps an engine by hand, with a request that joins while another one runs."""
    with LLM(threads=2, num_blocks=512) as llm:
        questions = [[{"role": "user", "content": f"What is the meaning of {word}?"}] for word in ("otter", "river")]
        for answer in llm.chat(questions, SamplingParams(temperature=0, max_tokens=60)):
            print(answer.outputs[0].text, f"({answer.usage.cached_tokens} of {answer.usage.prompt_tokens} cached)")

        engine = llm.engine
        engine.add_request("first", "An otter is", SamplingParams(temperature=0, max_tokens=12))
        num_steps = 0
        while engine.has_work:
            for output in engine.step():
                print(output.request_id, output.index, repr(output.text), output.finish_reason or "")
            num_steps += 1
            if num_steps == 3:
                engine.add_request("second", "A river is", SamplingParams(n=2, seed=1, max_tokens=8))


if __name__ == "__main__":
    main()
