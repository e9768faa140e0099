"""openai-agents: tools and an output type in one run, over chat completions and over responses, its default."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    RunResult,
    RunResultStreaming,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Home(BaseModel):
    place: str
    depth_m: float | None


class Animal(BaseModel):
    name: str
    kind: Literal["mammal", "bird"]
    legs: int
    homes: list[Home]


@function_tool
def define(word: str, kind: Literal["noun", "verb"]) -> str:
    """Looks a word up."""
    return f"{word}, {kind}: a mammal that swims"


@function_tool
def today() -> str:
    """Returns the date."""
    return "2026-11-28"


async def run(model: Model, tool_choice: str | None) -> None:
    agent = Agent(
        "words",
        instructions="You look words up.",
        tools=[define, today],
        output_type=Animal,
        model=model,
        model_settings=ModelSettings(tool_choice=tool_choice),
    )
    show("whole", await Runner.run(agent, "What is an otter?"))
    streamed = Runner.run_streamed(agent, "What is an otter?")
    async for _ in streamed.stream_events():
        pass
    show("streamed", streamed)


def show(way: str, result: RunResult | RunResultStreaming) -> None:
    called = [item.raw_item.name for item in result.new_items if item.type == "tool_call_item"]
    print(f"{way}: {' '.join(called)}, {result.final_output_as(Animal, raise_if_incorrect_type=True)!r}")


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0) as client:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            # Behind the first call the library takes "required" back.
            for tool_choice in (None, "required"):
                await run(kind(model="scripted", openai_client=client), tool_choice)


asyncio.run(main())
