"""Programs against the demo model behind the whole system, held against raw calls and against transformers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvrelay_programs import (
    Endpoint,
    Program,
    ProgramError,
    Selected,
    State,
    assistant,
    gen,
    image,
    program,
    select,
    system,
    user,
)
from kvrelay_programs.content import Content
from kvrelay_programs.endpoint import Caller
from kvrelay_programs.expressions import Select
from kvrelay_programs.workloads import sentence, text
from tests.e2e import reference
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack

GREEDY: dict[str, Any] = {"temperature": 0}
PREFIX = "An otter is an animal that lives in rivers. " * 6 + "An otter eats"
CHOICES = [" fish.", " stones and the sand of the river.", " the sun.", " grass"]


@pytest.fixture(scope="module")
def stack(demo_stack: Stack) -> Stack:
    return demo_stack


@pytest.fixture(scope="module")
def endpoint(stack: Stack) -> Endpoint:
    return Endpoint(stack.base_url)


class PromptsOnly(Endpoint):
    """Selects as on a server that is not kvrelay: by the log-probabilities of a prompt for each choice."""

    async def select(self, content: Content, step: Select, caller: Caller) -> Selected:
        return await self._by_prompts(content, step, caller)


def complete(stack: Stack, prompt: str, max_tokens: int) -> str:
    body = {"model": stack.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = stack.http.post("/v1/completions", json=body).raise_for_status().json()
    text: str = answer["choices"][0]["text"]
    return text


@program
def tree(s: State, subject: str) -> list[str]:
    s += f"{subject} is" + gen("what", 6) + "."
    forks = s.fork(3)
    for fork, time in zip(forks, ("day", "night", "winter"), strict=True):
        fork += f" In the {time} it" + gen("does", 5)
    forks.join(append=True)
    s += " And so it" + gen("end", 4)
    return [fork["does"] for fork in forks]


@pytest.mark.parametrize("stream", [False, True])
def test_a_program_gives_what_raw_calls_give(stack: Stack, endpoint: Endpoint, stream: bool) -> None:
    state = tree.run(subject="A river", endpoint=endpoint, sampling=GREEDY, stream=stream)
    text = "A river is"
    what = complete(stack, text, 6)
    if stream:
        assert "".join(state.text_iter("what")) == what
        assert "".join(state.text_iter()).startswith(text + what)
    text += what + "."
    does = [complete(stack, f"{text} In the {time} it", 5) for time in ("day", "night", "winter")]
    assert state.result == does
    text += "".join(f" In the {time} it{done}" for time, done in zip(("day", "night", "winter"), does, strict=True))
    text += " And so it"
    assert state.text() == text + complete(stack, text, 4)


def test_programs_of_a_batch_do_not_mix(stack: Stack, endpoint: Endpoint) -> None:
    subjects = [f"Animal {number}" for number in range(12)]
    states = tree.run_batch([{"subject": subject} for subject in subjects], endpoint=endpoint, sampling=GREEDY)
    for subject, state in zip(subjects, states, strict=True):
        assert state["what"] == complete(stack, f"{subject} is", 6)


def test_a_chat_is_continued_inside_a_message(stack: Stack, endpoint: Endpoint) -> None:
    @program
    def chat(s: State) -> None:
        s += system("You answer shortly.") + user("What is a river?")
        s += assistant("A river is" + gen("what", 8) + " It" + gen("does", 8))
        s += user("And an otter?") + assistant(gen("otter", 8))

    state = chat.run(endpoint=endpoint, sampling=GREEDY)
    messages = [{"role": "system", "content": "You answer shortly."}, {"role": "user", "content": "What is a river?"}]
    begun: Any = {"model": stack.model, "max_tokens": 8, "temperature": 0}
    for content, name in (("A river is", "what"), (f"A river is{state['what']} It", "does")):
        body = begun | {"messages": [*messages, {"role": "assistant", "content": content}]}
        body |= {"continue_final_message": True, "add_generation_prompt": False}
        answer = stack.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        assert answer["choices"][0]["message"]["content"] == state[name]
    messages += [
        {"role": "assistant", "content": f"A river is{state['what']} It{state['does']}"},
        {"role": "user", "content": "And an otter?"},
    ]
    answer = stack.http.post("/v1/chat/completions", json=begun | {"messages": messages}).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == state["otter"]
    assert state.messages() == [*messages, {"role": "assistant", "content": state["otter"]}]


def expected_scores(prefix: str, choices: Sequence[str]) -> list[list[float]]:
    """Log-probabilities of the tokens by which the texts differ from the prefix, from transformers."""
    encode = AutoTokenizer.from_pretrained(DEMO_MODEL).encode
    alone, texts = encode(prefix), [encode(prefix + choice) for choice in choices]
    first = min(
        next(at for at in range(len(ids) + 1) if at == len(alone) or at == len(ids) or ids[at] != alone[at])
        for ids in texts
    )
    rows = []
    for ids in texts:
        given = reference.logprobs(Path(DEMO_MODEL), ids, first)
        rows.append([float(given[row, token]) for row, token in enumerate(ids[first:])])
    return rows


@pytest.mark.parametrize("prefix", [PREFIX, PREFIX + " "], ids=["a boundary", "merged with the choice"])
@pytest.mark.parametrize("normalization", ["tokens", "none", "unconditional"])
@pytest.mark.parametrize("kind", [Endpoint, PromptsOnly])
def test_a_selection_is_that_of_an_oracle(stack: Stack, kind: type[Endpoint], prefix: str, normalization: Any) -> None:
    choices = CHOICES if prefix == PREFIX else [choice.strip() for choice in CHOICES]

    @program
    def choose(s: State) -> None:
        s += prefix + select("food", choices, normalization=normalization, unconditional_prefix="Answer:")

    selected = choose.run(endpoint=kind(stack.base_url)).value("food")
    assert isinstance(selected, Selected)
    rows = expected_scores(prefix, choices)
    scores = [math.fsum(row) for row in rows]
    if normalization == "tokens":
        scores = [score / len(row) for score, row in zip(scores, rows, strict=True)]
    if normalization == "unconditional":
        others = expected_scores("Answer:", choices)
        scores = [score - math.fsum(other) for score, other in zip(scores, others, strict=True)]
    assert [each.num_tokens for each in selected.scores] == [len(row) for row in rows]
    assert [each.score for each in selected.scores] == pytest.approx(scores, abs=1e-3)
    assert selected.text == choices[scores.index(max(scores))]


def test_a_selection_in_a_chat(stack: Stack, endpoint: Endpoint) -> None:
    @program
    def choose(s: State) -> None:
        s += user("What does an otter eat?")
        s += assistant("It eats" + select("food", CHOICES) + gen("rest", 4))

    selected = choose.run(endpoint=endpoint, sampling=GREEDY).value("food")
    assert isinstance(selected, Selected) and selected.text in CHOICES
    assert all(score.num_tokens >= 1 and score.total < 0 for score in selected.scores)
    by_prompts = choose.run(endpoint=PromptsOnly(stack.base_url), sampling=GREEDY).value("food")
    assert isinstance(by_prompts, Selected) and by_prompts.text == selected.text
    found, expected = ([(each.total, each.score) for each in one.scores] for one in (selected, by_prompts))
    assert [value for pair in found for value in pair] == pytest.approx(
        [value for pair in expected for value in pair], abs=1e-3
    )
    assert [each.num_tokens for each in selected.scores] == [each.num_tokens for each in by_prompts.scores]


def test_random_selections_are_those_of_a_prompt_for_each_choice(stack: Stack) -> None:
    @program
    def choose(s: State, prefix: str, choices: list[str]) -> None:
        s += prefix + select("chosen", choices, normalization="none")

    draw = random.Random(18)
    common = text(draw, 150)
    arguments: list[dict[str, Any]] = []
    for number in range(12):
        prefix = text(draw, draw.choice((1, 40))) if number % 2 else f"{common} {sentence(draw, 3)}"
        # The numbers make choices of which none begins another.
        choices = [
            f"{draw.choice(('', ' '))}{sentence(draw, draw.choice((1, 6)))}{index:03}"
            for index in range(draw.choice((1, 2, 7, 140 if number == 0 else 30)))
        ]
        arguments.append({"prefix": prefix, "choices": choices})
    found, expected = (
        [state.value("chosen") for state in choose.run_batch(arguments, endpoint=endpoint, progress=False)]
        for endpoint in (Endpoint(stack.base_url), PromptsOnly(stack.base_url))
    )
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, Selected) and isinstance(other, Selected)
        assert [each.num_tokens for each in one.scores] == [each.num_tokens for each in other.scores]
        assert [each.total for each in one.scores] == pytest.approx([each.total for each in other.scores], abs=1e-3)


def test_a_selection_computes_the_text_before_it_once(stack: Stack, endpoint: Endpoint) -> None:
    def computed() -> int:
        return sum(worker["totals"]["computed_blocks"] for worker in stack.workers("prefill"))

    prefix = "The heron stands in the water and waits. " * 40
    choices = [f" It saw {number:02} fish." for number in range(64)]

    @program
    def choose(s: State) -> None:
        s += prefix + gen("so", 1) + select("fish", choices)

    choose.run(endpoint=endpoint, sampling=GREEDY)
    num_prefix = len(AutoTokenizer.from_pretrained(DEMO_MODEL).encode(prefix)) // 16
    before = computed()
    choose.run(endpoint=endpoint, sampling=GREEDY | {"seed": 1})
    assert num_prefix > 20
    # Of each choice at most the blocks that hold its own tokens and the few before them that may change.
    assert computed() - before <= 64 * 3


def test_forks_compute_the_text_before_them_once(stack: Stack, endpoint: Endpoint) -> None:
    def computed() -> int:
        return sum(worker["totals"]["computed_blocks"] for worker in stack.workers("prefill"))

    @program
    def forks(s: State, subject: str) -> None:
        s += f"The {subject} stands in the water and waits. " * 40
        children = s.fork(16)
        for number, child in enumerate(children):
            child += f" It saw {number:02} fish" + gen("then", 2)
        children.join()

    num_prefix = len(AutoTokenizer.from_pretrained(DEMO_MODEL).encode("The crane stands in the water and waits. " * 40))
    before = computed()
    forks.run(subject="crane", endpoint=endpoint, sampling=GREEDY)
    assert computed() - before <= num_prefix // 16 + 16 * 3


def test_a_compiled_program_gives_what_the_interpreted_one_gives(stack: Stack, endpoint: Endpoint) -> None:
    rules = "It is said of the ibis that it stands in the water. " * 20

    @program
    def forks(s: State, subject: str) -> None:
        s += f"The {subject} waits. "
        children = s.fork(4)
        for number, child in enumerate(children):
            child += rules + f"It saw {number} fish" + gen("then", 4)
        children.join(append=True)

    compiled = forks.run(subject="ibis", endpoint=endpoint, sampling=GREEDY, compiled=True)
    assert compiled.text() == forks.run(subject="ibis", endpoint=endpoint, sampling=GREEDY).text()
    # The prefix was computed with the instructions before the calls, each of which found both.
    num_rules = len(AutoTokenizer.from_pretrained(DEMO_MODEL).encode(rules))
    assert compiled.usage.calls == 5 and compiled.usage.cached_tokens >= 4 * (num_rules - 32)


@program
def card(s: State, animal: str) -> None:
    """The program's constants are what the model writes anyway, but for the last."""
    s += f"Name: otter\nFood: fish\nHome: river\n\nName: heron\nFood: fish\nHome: lake\n\nName: {animal}\nFood:"
    s += gen("food", 8, stop="\n") + "\nHome:" + gen("home", 8, stop="\n") + "\nLegs:" + gen("legs", 3, stop="\n")


def test_text_beyond_a_call_is_used_where_the_program_goes_on_so(stack: Stack, endpoint: Endpoint) -> None:
    asked = card.run(animal="crane", endpoint=endpoint, sampling=GREEDY)
    saved = card.run(animal="crane", endpoint=endpoint, sampling=GREEDY, surplus_tokens=32)
    assert saved.text() == asked.text()
    assert [saved[name] for name in ("food", "home", "legs")] == [asked[name] for name in ("food", "home", "legs")]
    assert saved.usage.calls <= asked.usage.calls == 3

    @program
    def split(s: State) -> None:
        s += "An otter is" + gen("a", 4) + gen("b", 4) + gen("c", 4)

    saved = split.run(endpoint=endpoint, sampling=GREEDY, surplus_tokens=32)
    assert (saved.usage.calls, saved.text()) == (1, "An otter is" + complete(stack, "An otter is", 12))
    assert saved["a"] == complete(stack, "An otter is", 4)

    @program
    def chat(s: State) -> None:
        s += user("What is a river? 🦦") + assistant("It" + gen("a", 3) + gen("b", 3))

    saved = chat.run(endpoint=endpoint, sampling=GREEDY, surplus_tokens=16)
    assert saved.usage.calls == 1 and saved.messages() == chat.run(endpoint=endpoint, sampling=GREEDY).messages()


def test_constraints_and_types(endpoint: Endpoint) -> None:
    schema = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}

    @program
    def typed(s: State) -> None:
        s += "Legs of a dog: " + gen("legs", 8, dtype=int) + "\nCode: " + gen("code", regex="[A-C]{3}")
        s += "\nJSON: " + gen("json", 60, json_schema=schema) + "\nIs it? " + gen("is", choices=["yes", "no"])

    state = typed.run(endpoint=endpoint, sampling={"temperature": 1, "seed": 3})
    assert int(state["legs"]) is not None and state["is"] in ("yes", "no")
    assert len(state["code"]) == 3 and set(state["code"]) <= set("ABC")
    assert state["json"].startswith("{")


def test_refusals_of_the_endpoint_name_the_line(endpoint: Endpoint) -> None:
    @program
    def wrong(s: State) -> None:
        s += "x" + gen("y", 4, regex="(")

    with pytest.raises(ProgramError, match=r"test_programs.py:\d+: gen\('y'\): status 400"):
        wrong.run(endpoint=endpoint)

    @program
    def with_image(s: State) -> None:
        s += user("See" + image(b"not really")) + assistant(gen("what", 4))

    with pytest.raises(ProgramError, match=r"gen\('what'\): status 400"):
        with_image.run(endpoint=endpoint)


def test_a_cancelled_program_leaves_nothing_running(stack: Stack, endpoint: Endpoint) -> None:
    @program
    def endless(s: State) -> None:
        s += "A river" + gen("long", 1500, ignore_eos=True)

    state = endless.run(endpoint=endpoint, stream=True)
    assert next(iter(state.text_iter("long")))
    state.cancel()
    with pytest.raises(ProgramError, match="cancelled"):
        list(state.text_iter())
    stack.wait_until_clean()


@program
def quiz(s: State, number: int) -> None:
    s += user("Prefetched words of a long introduction. " * 8 + f"Question {number}: what is an otter?")
    s += assistant(gen("answer", 4))


@program
def quiz_text(s: State, number: int) -> None:
    s += "Other prefetched words of an introduction. " * 8 + f"Question {number}: what is an otter?" + gen("answer", 4)


@pytest.mark.parametrize("each", [quiz, quiz_text], ids=["chat", "text"])
def test_a_prefetched_beginning_is_cached_for_every_program_of_a_batch(endpoint: Endpoint, each: Program) -> None:
    batch = [{"number": number} for number in range(3)]
    first = each.run_batch(batch, endpoint=endpoint, sampling=GREEDY, prefetch=True)
    again = each.run_batch(batch, endpoint=endpoint, sampling=GREEDY)
    assert [state["answer"] for state in first] == [state["answer"] for state in again]
    assert all(state.usage.cached_tokens >= 32 for state in first)
