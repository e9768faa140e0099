"""Text completions as JSON and as server-sent events."""

from __future__ import annotations

from typing import Any

import orjson

from kvrelay_router.openai.answers.answer_format import Collected, beam_scores
from kvrelay_router.openai.answers.choice import ChoiceOutput
from kvrelay_router.openai.answers.logprob_format import ScoredToken, completion_logprobs
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.generation import PromptRun, Step
from kvrelay_router.openai.schema.completion_request import CompletionRequest
from kvrelay_router.text.service import DecodedPrompt

NOTHING_ELSE = b'"logprobs":null,"finish_reason":null,"stop_reason":null'


class CompletionFormat:
    """Writes text completions."""

    def __init__(
        self,
        service: ApiService,
        answer_id: str,
        request: CompletionRequest,
        runs: list[PromptRun],
        echoed: list[DecodedPrompt],
    ) -> None:
        self._tokenizer = service.text.tokenizer
        self._request = request
        self._head = service.answer_head(answer_id, "text_completion")
        self._prefix = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._is_plain = not (request.echo or request.return_token_ids or request.logprobs is not None)
        self._echoed = {id(run): echo for run, echo in zip(runs, echoed, strict=False)}

    def chunk(self, step: Step) -> bytes:
        """One event; none while everything is withheld."""
        output, choice = step.output, step.choice
        first = not choice.started
        if not output.text and output.finish_reason is None and not (first and self._request.echo):
            return b""
        choice.started = True
        content = self._choice(step.run, choice.index, output, first=first)
        return self._prefix + orjson.dumps(content) + self._suffix

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """See `AnswerFormat`."""
        if not self._is_plain:
            return None
        return b'%b{"index":%d,"text":' % (self._prefix, index), b",%b}%b" % (NOTHING_ELSE, self._suffix)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last event: no choice, but the usage."""
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": usage}) + b"\n\n"

    def whole(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain answer, with the best choices of each prompt."""
        chosen = self._best(choices)
        contents = [self._choice(each.run, index, each.whole(), first=True) for index, each in enumerate(chosen)]
        return {**self._head, "choices": contents, "usage": usage}

    def _best(self, choices: list[Collected]) -> list[Collected]:
        """Of each prompt's `best_of` sequences the `n` with the highest mean logprob, best first."""
        drawn, kept = self._request.num_sequences, self._request.n
        if drawn == kept:
            return choices
        best = []
        for start in range(0, len(choices), drawn):
            ranked = sorted(choices[start : start + drawn], key=_mean_logprob, reverse=True)
            best += ranked[:kept]
        return best

    def _choice(self, run: PromptRun, index: int, output: ChoiceOutput, *, first: bool) -> dict[str, Any]:
        """`first`: the output begins the choice, so it carries what belongs to the prompt."""
        echo = self._echoed.get(id(run)) if first else None
        content: dict[str, Any] = {
            "index": index,
            "text": output.text if echo is None else echo.text + output.text,
            "logprobs": self._logprobs(run, output, echo),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **beam_scores(output),
        }
        if self._request.return_token_ids:
            content["token_ids"] = output.token_ids
            if first:
                content["prompt_token_ids"] = run.request.prompt_ids
        return content

    def _logprobs(self, run: PromptRun, output: ChoiceOutput, echo: DecodedPrompt | None) -> dict[str, Any] | None:
        num_top = self._request.logprobs
        if num_top is None:
            return None
        tokens = _scored_prompt(run, echo) if echo is not None else []
        tokens += [
            ScoredToken(entry.token_id, offset, entry)
            for entry, offset in zip(output.logprobs, output.offsets, strict=True)
        ]
        return completion_logprobs(self._tokenizer, tokens, num_top)


def _scored_prompt(run: PromptRun, echo: DecodedPrompt) -> list[ScoredToken]:
    """The prompt's tokens; the first one follows nothing, so it has no logprob."""
    entries = [None, *run.prompt_logprobs]
    return [
        ScoredToken(token_id, offset, entry)
        for token_id, offset, entry in zip(run.request.prompt_ids, echo.offsets, entries, strict=False)
    ]


def _mean_logprob(collected: Collected) -> float:
    return collected.choice.logprob_sum / max(1, collected.choice.num_tokens)
