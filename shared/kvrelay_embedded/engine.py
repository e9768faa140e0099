"""One engine with its requests, driven by its caller: `add_request`, `step`, `abort`.

Nothing runs between calls. An engine is used by one thread at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
import time
import weakref
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from kvrelay.config.field_values import explanations, sentence
from kvrelay.config.worker import WorkerConfig
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.kv.pool import BlockPool
from kvrelay.protocol.messages import Header, PeerRef, pack_tokens
from kvrelay.protocol.messages import Prompt as PromptMessage
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.ranked_runner import RankedRunner
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.step.batch import ModelSpec, RowsFailed
from kvrelay.text.chat_template import ChatTemplateError
from kvrelay.text.choice import Choice
from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.completion_request import CompletionRequest
from kvrelay.text.request.validation import (
    ModelLimits,
    allowed_output,
    check_bad_words,
    check_token_ids,
    check_vocabulary,
    completion_output,
    make_sampling,
    stop_rules,
)
from kvrelay.text.service import ChatOptions, TextService
from kvrelay.worker.requests import make_sequence
from kvrelay.worker.speeds import calibrate
from kvrelay.worker.startup import make_cache, make_scheduler, scheduler_settings
from kvrelay.worker.step_loop import StepTotals
from kvrelay.worker.worker_main import load_runner
from kvrelay_embedded.engine_steps import EngineSteps
from kvrelay_embedded.outputs import CompletionOutput, EngineRequest, RequestOutput, StepOutput
from kvrelay_embedded.sampling_params import SamplingParams

SETTINGS = (
    "dtype", "kv_cache_dtype", "load_format", "device", "cuda_graphs",
    "fused_layers", "batch_invariant", "quantization", "threads", "block_size", "num_blocks", "kv_memory_bytes",
    "memory_utilization", "max_model_len", "prefix_cache", "prefix_lookup", "token_budget", "max_running", "scheduler",
    "chunking", "queue_order", "retraction", "preemption", "swap_space", "new_token_ratio",
    "jump_forward", "speculation",
    "tensor_parallel_size",
    "pipeline_parallel_size", "local_ranks", "rank_host", "rank_port", "rank_timeout_s",
    "curve_key_file",
)  # fmt: skip
"""docs/configuration.md says what each means. The others concern services."""


def engine_config(model: str | None, settings: Mapping[str, Any]) -> WorkerConfig:
    """The configuration of an engine. Raises ValueError for an unknown setting or a wrong value, by name."""
    for name in settings:
        if name not in SETTINGS:
            close = get_close_matches(name, SETTINGS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"the engine has no setting {name!r}{hint}")
    named = {} if model is None else {"model": model}
    try:
        return WorkerConfig(role="decode", **named, **settings)
    except ValidationError as error:
        name, given, fault = next(explanations(WorkerConfig, error))
        raise ValueError(sentence(f"{name} = {given!r}" if name else "", fault)) from None


T = TypeVar("T")


class EmbeddedText:
    """The router's text service, for callers that do not await, from any thread and under a running event loop."""

    def __init__(self, model: str) -> None:
        self.service = TextService.load(model)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")

    def close(self) -> None:
        self.service.close()
        self._thread.shutdown(wait=True)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """A thread of its own, because a notebook's thread has an event loop that runs."""
        return self._thread.submit(asyncio.run, work).result()


Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
"""A text, or token ids."""
_CALLER = PeerRef("embedded", "embedded", "embedded")
_TEXT_OWNER = ""
"""All requests are of one caller, so guesses may come from all earlier outputs with the same `cache_salt`."""
_DEFAULTS = SamplingParams()


class Engine:
    """A model with its KV pool, prefix cache and scheduler.

    `model`: a directory or a hub name; None: the demo model. `settings` are fields of a worker's configuration that
    have a meaning without services (docs/embedded.md). Loads the model, which takes seconds. Raises ValueError for a
    wrong setting, OSError for a model that is not there, UnsupportedModel for one that does not fit.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        config = engine_config(model, settings)
        self._text = EmbeddedText(config.model)
        self._end_ranks: Callable[[], object] = lambda: None
        try:
            self._load(config)
        except BaseException:
            self._end_ranks()
            self._text.close()
            vars(self).clear()  # a traceback may keep this object, and with it the model and its pool
            raise
        self._open: dict[str, EngineRequest] = {}
        self._by_key: dict[str, EngineRequest] = {}  # keyed by the first part of its sequences' keys
        self._numbers = itertools.count()

    def _load(self, config: WorkerConfig) -> None:
        self._runner: ModelRunner = load_runner(config, hands_over=False)
        if isinstance(self._runner, RankedRunner):
            # Also if the engine is never closed: the ranks end with it.
            self._end_ranks = weakref.finalize(self, self._runner.close)
        spec = self._runner.spec
        pool = BlockPool(spec.num_blocks, spec.block_size)
        self._scheduler = make_scheduler(config, spec, pool, make_cache(config, pool))
        if config.chunking == "dynamic" or config.speculation != "off":
            calibrate(self._scheduler, self._runner, config.token_budget)
        self._limits = _limits(config, spec)
        most = scheduler_settings(config).max_uncommitted if spec.pipeline_parallel_size > 1 else 1
        self.totals = StepTotals()
        """Totals of all steps since the start."""
        self._steps = EngineSteps(self._runner, self._scheduler, most, self.totals)

    @property
    def spec(self) -> ModelSpec:
        """The facts of the loaded model and its pool."""
        return self._runner.spec

    @property
    def request_ids(self) -> Collection[str]:
        """The requests that have not ended."""
        return self._open.keys()

    @property
    def has_work(self) -> bool:
        """Returns whether `step` has anything to do."""
        return bool(self._open) or self._steps.are_in_flight

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """A conversation as token ids. Raises ValueError if the chat template refuses it, or there is none."""
        options = ChatOptions(template_kwargs=template_kwargs or {})
        try:
            return self._text.wait(self._text.service.encode_chat([dict(message) for message in messages], options))
        except ChatTemplateError as error:
            raise ValueError(f"The messages cannot be rendered: {error}") from None

    # -- requests -----------------------------------------------------------------------------------------------------

    def add_request(self, request_id: str | None, prompt: Prompt, params: SamplingParams | None = None) -> str:
        """Queues a request. Returns its id, which is a new one if it is None.

        Raises ValueError, and queues nothing, for an id that is in use, and for a prompt or parameters with which the
        model cannot run it.
        """
        number = f"{next(self._numbers)}"
        name = f"request-{number}" if request_id is None else request_id
        if name in self._open:
            raise ValueError(f"request {name!r} has not ended yet")
        request = (params or _DEFAULTS).request
        try:
            prompt_ids = self._prompt_ids(prompt, request)
            sampling = self._sampling(request, prompt_ids)
        except ApiError as error:
            raise ValueError(error.message) from None
        opened = EngineRequest(
            name, prompt if isinstance(prompt, str) else None, prompt_ids, self._choices(request, prompt_ids), []
        )
        self._queue(number, opened, request, sampling)
        self._open[name] = self._by_key[number] = opened
        return name

    def abort(self, request_id: str) -> bool:
        """Ends a request, of which `step` then brings nothing more. Returns whether it was running."""
        opened = self._open.get(request_id)
        if opened is None:
            return False
        for key in opened.keys:
            self._drop(key)
            opened.ended(key, "abort")
        self._leave(opened)
        return True

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Computes one step, and returns what it brought. Returns nothing if there is nothing to do.

        A step that fails ends its requests with `finish_reason` "error"; the engine goes on. Raises DeviceLost if it
        cannot. A forward that is interrupted (KeyboardInterrupt) ends its requests too, which no output tells.
        """
        told: list[StepOutput] = []
        landed, recomputed = self._steps.run(), self._steps.recomputed
        for sequence in recomputed:
            if (opened := self._by_key.get(sequence.key[0])) is not None:
                opened.recomputed(sequence.key)
        recomputed.clear()
        if landed is None:
            return told
        plan, result = landed
        if isinstance(result, BaseException):
            told = self._step_failed(plan, result)
            if not isinstance(result, Exception):  # Ctrl-C, nearly always during the forward
                raise result
            return told
        started = time.perf_counter()
        outputs = self._scheduler.commit(plan, result)
        self.totals.add(plan, result, ahead=False)
        for output in outputs:
            told += self._taken(output)
        self.totals.commit_s += time.perf_counter() - started
        return told

    def run(self, request_ids: Collection[str]) -> Iterator[RequestOutput]:
        """Steps until these requests have ended, and gives each as soon as it has. Other requests go on beside them,
        but what they bring is lost: to mix them, call `step`."""
        requests = {name: self._open[name] for name in request_ids}
        texts = {name: [CompletionOutput(choice.index) for choice in each.choices] for name, each in requests.items()}
        while requests:
            for told in self.step():
                if told.request_id in requests:
                    texts[told.request_id][told.index].add(told)
            for name in [name for name, opened in requests.items() if opened.has_ended]:
                yield requests.pop(name).output(texts.pop(name))

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestOutput:
        """Runs one request to its end. Raises ValueError as `add_request` does."""
        name = self.add_request(request_id, prompt, params)
        try:
            return next(self.run([name]))
        except BaseException:
            self.abort(name)
            raise

    def close(self) -> None:
        """Ends all requests, other ranks and the threads for text. The rest ends with the last reference to this."""
        for name in list(self._open):
            self.abort(name)
        self._end_ranks()
        self._text.close()

    # -- inner --------------------------------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: Prompt, request: CompletionRequest) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self._text.service.tokenizer
            prompt_ids = tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
        else:
            prompt_ids = [operator.index(token_id) for token_id in prompt]
        if not prompt_ids:
            raise ValueError("the prompt must not be empty")
        check_token_ids(prompt_ids, self._limits, "prompt")
        return prompt_ids

    def _sampling(self, request: CompletionRequest, prompt_ids: list[int]) -> Sampling:
        limits = self._limits
        check_vocabulary(request, limits)
        text = self._text
        bad_words = text.wait(text.service.encode_bad_words(request.bad_words)) if request.bad_words else ()
        check_bad_words(request, bad_words, limits)
        if request.grammar is not None:
            try:
                text.wait(text.service.grammars.check(request.grammar))
            except GrammarError as error:
                raise ValueError(f"The output cannot be constrained: {error}") from None
        wanted = completion_output(request, text.service.sampling_defaults)
        max_tokens = allowed_output(len(prompt_ids), wanted, limits, "prompt")
        return make_sampling(
            request,
            text.service.sampling_defaults,
            limits,
            num_prompt_tokens=len(prompt_ids),
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            bad_words=bad_words,
        )

    def _choices(self, request: CompletionRequest, prompt_ids: list[int]) -> list[Choice]:
        text = self._text.service
        stop = stop_rules(request, text.sampling_defaults)
        return [
            Choice(index, text.detokenizer(prompt_ids, skip_special_tokens=request.skip_special_tokens), stop)
            for index in range(request.n)
        ]

    def _queue(self, number: str, opened: EngineRequest, request: CompletionRequest, sampling: Sampling) -> None:
        """Raises ValueError, and queues nothing, if the worker's own checks refuse a sequence."""
        prompt = PromptMessage(
            tokens=pack_tokens(opened.prompt_ids),
            sampling=sampling,
            cache_salt=request.cache_salt,
            priority=request.priority,
            num_samples=request.num_samples,
            text_owner=_TEXT_OWNER,
        )
        for index in range(request.num_samples):
            header = Header(
                sender="embedded", incarnation="embedded", reply_to="embedded", to_incarnation="embedded", link=1,
                request=number, sequence=index,
            )  # fmt: skip
            try:
                sequence = make_sequence(header, prompt, _CALLER, self.spec, self._scheduler.limits.max_running)
                self._runner.add_sequence(sequence.key, sampling, opened.prompt_ids, len(opened.prompt_ids))
                opened.keys.append(sequence.key)
                self._scheduler.add(sequence)
            except BaseException:
                for key in opened.keys:
                    self._drop(key)
                raise

    def _taken(self, output: SequenceOutput) -> list[StepOutput]:
        key = output.sequence.key
        opened = self._by_key[key[0]]
        told = opened.take(output)
        if output.finish is not None:
            self._runner.drop_sequence(key)
        elif any(each.finish_reason is not None for each in told):  # a stop string
            self._drop(key)
        if opened.has_ended:
            self._leave(opened)
        return told

    def _step_failed(self, plan: StepPlan, error: BaseException) -> list[StepOutput]:
        self.totals.num_failed_steps += 1
        keys = error.keys if isinstance(error, RowsFailed) else None
        told: list[StepOutput] = []
        for sequence in self._scheduler.fail_step(plan, keys):
            told += self._failed(sequence.key, f"{type(error).__name__}: {error}")
        return told

    def _failed(self, key: SequenceKey, cause: str) -> list[StepOutput]:
        self._runner.drop_sequence(key)
        if (opened := self._by_key.get(key[0])) is None:  # it was aborted while the step was in flight
            return []
        told = opened.ended(key, "error", cause)
        if opened.has_ended:
            self._leave(opened)
        return told

    def _drop(self, key: SequenceKey) -> None:
        self._scheduler.abort(key)
        self._runner.drop_sequence(key)

    def _leave(self, opened: EngineRequest) -> None:
        del self._open[opened.request_id]
        del self._by_key[opened.keys[0][0]]


def _limits(config: WorkerConfig, spec: ModelSpec) -> ModelLimits:
    return ModelLimits(
        spec.max_model_len,
        spec.vocab_size,
        config.max_running,
        spec.num_blocks,
        spec.block_size,
    )
