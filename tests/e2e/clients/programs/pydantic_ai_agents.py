"""pydantic-ai: tools and an output type in one run, over chat completions and over responses, with each of its ways to
get a typed output: a format of the API, a tool of its own, and a schema in the prompt."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ModelMessage, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Home(BaseModel):
    place: str
    depth_m: float | None


class Animal(BaseModel):
    name: str
    kind: Literal["mammal", "bird"]
    legs: int
    homes: list[Home]


def define(word: str, kind: Literal["noun", "verb"]) -> str:
    """Looks a word up."""
    return f"{word}, {kind}: a mammal that swims"


def today() -> str:
    """Returns the date."""
    return "2026-11-28"


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
    for model in (OpenAIChatModel, OpenAIResponsesModel):
        for output in (NativeOutput(Animal), ToolOutput(Animal), PromptedOutput(Animal)):
            agent = Agent(model("scripted", provider=provider), output_type=output, tools=[define, today])
            whole = await agent.run("What is an otter?")
            show("whole", whole.all_messages(), whole.output)
            async with agent.run_stream("What is an otter?") as streamed:
                async for _ in streamed.stream_output():
                    pass
                show("streamed", streamed.all_messages(), await streamed.get_output())


def show(way: str, messages: list[ModelMessage], output: Animal) -> None:
    called = [part.tool_name for message in messages for part in message.parts if isinstance(part, ToolCallPart)]
    print(f"{way}: {' '.join(called)}, {output!r}")


asyncio.run(main())
