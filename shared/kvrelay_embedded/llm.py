"""Generates for lists of prompts, as a script or a notebook wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, Self, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvrelay_embedded.engine import Engine, Prompt
from kvrelay_embedded.outputs import RequestOutput
from kvrelay_embedded.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model to generate with. `settings` are those of `Engine`."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.engine = Engine(model, **settings)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """The answers in the order of the prompts: texts, or lists of token ids. All run together.

        `params`: for all prompts, or one for each. `progress`: a bar on stderr for several prompts. Raises ValueError
        for a prompt that cannot run, before any runs.
        """
        listed = _listed(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(listed)
        if len(each) != len(listed):
            raise ValueError(f"{len(listed)} prompts with {len(each)} sampling parameters")
        place: dict[str, int] = {}
        answers: list[RequestOutput | None] = [None] * len(listed)
        try:
            for number, (prompt, one) in enumerate(zip(listed, each, strict=True)):
                place[self.engine.add_request(None, prompt, one)] = number
            with _bar(shown=progress and len(listed) > 1) as bar:
                task = bar.add_task("prompts", total=len(listed))
                for output in self.engine.run(list(place)):
                    answers[place.pop(output.request_id)] = output
                    bar.advance(task)
        finally:
            for request_id in place:  # refused or interrupted
                self.engine.abort(request_id)
        return [answer for answer in answers if answer is not None]

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """The answers to one conversation or several. `template_kwargs` go to the chat template.

        Raises ValueError, also for a model without a chat template.
        """
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        several = cast("Sequence[Messages]", [conversations] if one else conversations)
        prompts: list[Prompt] = [self.engine.chat_prompt(messages, template_kwargs) for messages in several]
        return self.generate(prompts, params, progress=progress)

    def close(self) -> None:
        """Ends the requests and the threads for text. The rest is freed with the last reference to this."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bar(*, shown: bool) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, disable=not shown, console=Console(stderr=True))


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a text, or a list or an array of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], Integral):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))
