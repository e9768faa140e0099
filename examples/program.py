"""A program of several calls: what a word means, three sentences at the same time, and a choice by likelihood.

Run: KVRELAY_URL=http://127.0.0.1:8000 .venv/bin/python examples/program.py
"""

from __future__ import annotations

from kvrelay_programs import ProgramError, Selected, State, gen, program, select


@program
def describe(s: State, animal: str) -> None:
    s += f"{animal} is" + gen("what", 12, stop=".") + "."
    forks = s.fork(3)
    for fork, time in zip(forks, ("day", "night", "winter"), strict=True):
        fork += f" In the {time} it" + gen("does", 10, stop=".") + "."
    forks.join(append=True)
    s += " So it is" + select("kind", [" a bird.", " a fish.", " a mammal."])


if __name__ == "__main__":
    try:
        state = describe.run(animal="An otter", sampling={"temperature": 0})
    except ProgramError as error:
        raise SystemExit(f"{error}; start a server with `make serve`, or set KVRELAY_URL") from None
    print(state.text())
    kind = state.value("kind")
    assert isinstance(kind, Selected)
    for score in kind.scores:
        print(f"{score.score:8.3f} {score.choice}")
