"""LangChain: `create_agent` with tools and an output type in one run, by a format of the API and by a tool, and models
with structured output; over chat completions and over responses."""

import sys
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Home(BaseModel):
    place: str
    depth_m: float | None


class Animal(BaseModel):
    """An animal."""

    name: str
    kind: Literal["mammal", "bird"]
    legs: int
    homes: list[Home]


@tool
def define(word: str, kind: Literal["noun", "verb"]) -> str:
    """Looks a word up."""
    return f"{word}, {kind}: a mammal that swims"


@tool
def today() -> str:
    """Returns the date."""
    return "2026-11-28"


def show(way: str, state: dict[str, Any]) -> None:
    called = [call["name"] for message in state["messages"] for call in getattr(message, "tool_calls", ())]
    print(f"{way}: {' '.join(called)}, {state['structured_response']!r}")


for responses in (False, True):
    model = ChatOpenAI(
        model="scripted",
        base_url=f"{sys.argv[1]}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=responses,
    )
    # The library makes tools strict beside a format, but not over responses.
    prompt = "You look words up. Calls are free." if responses else "You look words up."
    asked = {"messages": [{"role": "user", "content": "What is an otter?"}]}
    for strategy in (ProviderStrategy(Animal), ToolStrategy(Animal)):
        agent = create_agent(model, [define, today], system_prompt=prompt, response_format=strategy)
        show("whole", agent.invoke(asked))
        state: dict[str, Any] = {}
        for kind, part in agent.stream(asked, stream_mode=["messages", "values"]):
            state = part if kind == "values" else state
        show("streamed", state)
    for method in ("json_schema", "function_calling", "json_mode"):
        structured = model.with_structured_output(Animal, method=method)
        print(f"{method}: {structured.invoke('Describe an otter as JSON.')!r}")
        *_, last = structured.stream("Describe an otter as JSON.")
        print(f"{method}: {last!r}")
