"""A dispatcher without workers: it answers every request from a script, and records what it was asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import FinishReason, ScoredText, TokenLogprobs
from kvrelay.text.choice import SequenceDelta
from kvrelay.text.request.validation import ModelLimits
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import DeltaSink, GenerateRequest, NoWorkerReady, RequestFailed, ServedBy
from kvrelay_router.dispatch.placement import PromptPrefixes
from kvrelay_router.dispatch.running_request import RunningRequest


@dataclass(slots=True)
class Script:
    """What one sequence gets: tokens in deltas of `per_delta`, `pause_s` before each delta."""

    token_ids: list[int]
    finish: FinishReason = FinishReason.STOP_TOKEN
    per_delta: int = 1
    pause_s: float = 0.0
    hang_after: int | None = None  # deltas before nothing comes any more, or not until `resume`
    resume: asyncio.Event | None = None
    awaits_worker: bool = False  # meanwhile no worker is ready
    fail_after: int | None = None  # deltas before RequestFailed
    failure: RequestFailed | None = None
    end_silently: bool = False  # the last delta says no finish reason
    logprob: float = -0.5
    beams: list[ScoredText] = field(default_factory=list)  # of a beam search: in one delta, without tokens


def score(token_id: int, num_top: int, logprob: float = -0.5) -> TokenLogprobs:
    """Log-probabilities that a test can foresee: the token itself is the most likely one."""
    top = [token_id, *[other for other in range(1, num_top + 1) if other != token_id]][:num_top]
    return TokenLogprobs(token_id, logprob, top, [logprob - rank for rank in range(len(top))])


def prompt_logprob(token_id: int) -> float:
    """That of a token of an ending, or of what is before it."""
    return -1.0 - token_id / 1024


def wanted(entry: TokenLogprobs, token_ids: Sequence[int]) -> TokenLogprobs:
    """The entry with these tokens, if there are any, in place of the most likely ones."""
    if not token_ids:
        return entry
    values = [-float(number + 1) for number in range(len(token_ids))]
    return TokenLogprobs(entry.token_id, entry.logprob, list(token_ids), values)


class ScriptedHandle(RunningRequest):
    """One running request of the script, which starts when a sink is connected. Like a fleet of workers that waits for
    the client: the next deltas come when the sink or `take` has taken those before."""

    is_over = False
    awaits_worker = False

    def __init__(self, dispatcher: ScriptedDispatcher, request: GenerateRequest) -> None:
        self.served_by = ServedBy("prefill-0", "decode-0")
        self.request = request
        self.stopped: list[int] = []
        self.cancelled_at: float | None = None
        self.num_pushed = 0
        self.error: RequestFailed | None = None
        self.submitted_unix_s = time.time()
        self._dispatcher = dispatcher
        self._deltas: list[SequenceDelta] = []
        self._taken = asyncio.Event()
        self._sink: DeltaSink | None = None
        self._script: asyncio.Task[None] | None = None

    @property
    def has_deltas(self) -> bool:
        """Those that the sink was not ready for."""
        return bool(self._deltas)

    def connect(self, sink: DeltaSink) -> None:
        self._sink = sink
        self._script = asyncio.create_task(self._run())

    def disconnect(self) -> None:
        self._sink = None
        if self._script is not None:
            self._script.cancel()

    def take(self) -> list[SequenceDelta]:
        deltas, self._deltas = self._deltas, []
        self._taken.set()
        return deltas

    def stop(self, sequence: int) -> None:
        self.stopped.append(sequence)

    def cancel(self) -> None:
        if self.cancelled_at is None:
            self.cancelled_at = time.monotonic()

    async def _run(self) -> None:
        try:
            await self._play()
        except RequestFailed as error:
            self.error = error
        self.is_over = True
        if self._sink is not None:
            self._sink.wake()

    async def _play(self) -> None:
        scripts = [self._dispatcher.script(self.request, i) for i in range(self.request.num_sequences)]
        plans = [self._plan(sequence, script) for sequence, script in enumerate(scripts)]
        for number in range(max(map(len, plans)) + 1):
            for script in scripts:
                if script.pause_s:
                    await asyncio.sleep(script.pause_s)
                if script.fail_after == number:
                    raise script.failure or RequestFailed("all workers are gone", FailureKind.WORKER_LOST)
                if script.hang_after == number:
                    await self._hang(script)
            if batch := [plan[number] for plan in plans if number < len(plan)]:
                await asyncio.sleep(0)
                await self._deliver(batch)
                if len(set(self.stopped)) == len(plans):
                    return

    async def _hang(self, script: Script) -> None:
        self.awaits_worker = script.awaits_worker
        if self.awaits_worker and self._sink is not None:
            self._sink.wake()
        await (script.resume or asyncio.Event()).wait()
        self.awaits_worker = False

    async def _deliver(self, batch: list[SequenceDelta]) -> None:
        if self._sink is None:
            return
        if self._dispatcher.pushes and self._sink.can_take():
            self.num_pushed += 1
            self._sink.take(batch)
            return
        self._taken.clear()
        self._deltas = batch
        self._sink.wake()
        await self._taken.wait()

    def _plan(self, sequence: int, script: Script) -> list[SequenceDelta]:
        sampling, prompt_ids = self.request.sampling, self.request.prompt_ids
        if self.request.endings:
            ending = self.request.endings[sequence]
            sampling, prompt_ids = ending.sampling, [*prompt_ids, *ending.token_ids]
        if script.beams:
            return [SequenceDelta(sequence, [], cached_tokens=16, finish=script.beams[0].finish, texts=script.beams)]
        token_ids, finish = script.token_ids, script.finish
        if len(token_ids) > sampling.max_tokens:
            token_ids, finish = token_ids[: sampling.max_tokens], FinishReason.LENGTH
        prompt_logprobs = []
        if sampling.prompt_logprobs is not None:
            scored = prompt_ids[sampling.logprob_start_len :]
            prompt_logprobs = [
                score(token, sampling.prompt_logprobs, prompt_logprob(token) if self.request.endings else -1.0)
                for token in scored
            ]
        cuts = range(0, max(1, len(token_ids)), script.per_delta)
        plan = []
        for cut in cuts:
            part = token_ids[cut : cut + script.per_delta]
            last = cut == cuts[-1]
            plan.append(
                SequenceDelta(
                    sequence,
                    part,
                    logprobs=[]
                    if sampling.logprobs is None
                    else [
                        wanted(score(token, sampling.logprobs, script.logprob), sampling.logprob_token_ids)
                        for token in part
                    ],
                    prompt_logprobs=prompt_logprobs if cut == 0 else [],
                    cached_tokens=16 if cut == 0 else None,
                    finish=finish if last and not script.end_silently else None,
                )
            )
        return plan


@dataclass
class ScriptedDispatcher(RouterDispatcher):
    script: Callable[[GenerateRequest, int], Script]
    model_limits: ModelLimits | None = field(default_factory=lambda: ModelLimits(512, 400, 64, 200, 16))
    is_ready: bool = True
    ended_sessions: list[tuple[str, str]] = field(default_factory=list)
    handles: list[ScriptedHandle] = field(default_factory=list)
    refuse_after: int | None = None  # submits before NoWorkerReady
    pushes: bool = True  # deltas go to sinks that are ready; False: all go through the streams' tasks

    @property
    def requests(self) -> list[GenerateRequest]:
        return [handle.request for handle in self.handles]

    def limits(self) -> ModelLimits | None:
        return self.model_limits

    async def first_limits(self) -> ModelLimits | None:
        return self.model_limits

    def ready(self) -> bool:
        return self.is_ready

    def ready_workers(self) -> dict[str, int]:
        return {"prefill": 1, "decode": 1}

    async def prepare(self, request: GenerateRequest) -> PromptPrefixes:
        """As the real one without an index."""
        return PromptPrefixes(request.prompt_ids)

    def submit(self, request: GenerateRequest, prepared: PromptPrefixes | None = None) -> ScriptedHandle:
        if not self.is_ready or self.refuse_after == len(self.handles):
            raise NoWorkerReady("no worker is ready", retry_after_s=2.5)
        self.handles.append(ScriptedHandle(self, request))
        return self.handles[-1]

    async def fleet(self, owner: str | None = None) -> dict[str, Any]:
        return {"workers": []}

    def recent_requests(self, limit: int, owner: str | None = None, session: str | None = None) -> list[dict[str, Any]]:
        of_owner = [each for each in self.handles if owner in (None, each.request.owner)]
        found = [each for each in of_owner if session in (None, each.request.session)][:limit]
        return [{"request_id": each.request.request_id, "submitted_unix_s": each.submitted_unix_s} for each in found]

    def end_session(self, session: str, owner: str = "") -> None:
        self.ended_sessions.append((owner, session))

    async def timeline(self, request_id: str, owner: str | None = None) -> dict[str, Any] | None:
        found = self.recent_request(request_id, owner)
        return found and {**found, "events": []}

    def recent_request(self, request_id: str, owner: str | None = None) -> dict[str, Any] | None:
        known = [each for each in self.requests if each.request_id == request_id and owner in (None, each.owner)]
        return {"id": known[0].request_id} if known else None
