"""Programs: functions over a state, run alone or in a batch."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import cache, update_wrapper
from typing import Any, Literal, TypeVar

from kvrelay_programs.content import Content
from kvrelay_programs.endpoint import Endpoint
from kvrelay_programs.errors import Location, ProgramError, caller_location
from kvrelay_programs.graph import Graph, Trace, batch_arguments, graph_of, trace, with_unknown
from kvrelay_programs.run import Run, RunOptions
from kvrelay_programs.state import State, check_forks, wait_for_calls

Function = Callable[..., Any]


class Program:
    """A function whose first parameter is a state, made by `@program`. Calling it inside another program runs it on
    that program's state.
    """

    def __init__(self, function: Function) -> None:
        update_wrapper(self, function)
        self.name = function.__name__
        self._function = function
        self._signature = inspect.signature(function)
        names = list(self._signature.parameters)
        if not names:
            raise TypeError(f"the program {function.__name__} needs a parameter for its state")
        reserved = _RUN_ARGUMENTS.intersection(names[1:])
        if reserved:
            raise TypeError(f"{function.__name__}: run() has its own {' and '.join(sorted(reserved))}; rename it")

    def __call__(self, state: State, *args: Any, **kwargs: Any) -> Any:
        return self._function(state, *args, **kwargs)

    def run(
        self,
        *,
        base_url: str | None = None,
        model: str | None = None,
        api_key: str | None = None,
        endpoint: Endpoint | None = None,
        sampling: Mapping[str, Any] | None = None,
        stream: bool = False,
        deadline_s: float | None = None,
        parallel: bool = True,
        fork_hint: bool = True,
        surplus_tokens: int = 0,
        compiled: bool = False,
        **arguments: Any,
    ) -> State:
        """Runs the program with `arguments` and returns its state, complete; with `stream`, at once.

        `sampling` has fields of requests for calls that leave them out, such as `temperature`. Without `endpoint`, one
        is made of `base_url` (or `KVRELAY_URL`, or http://127.0.0.1:8000), `model` and `api_key`. `parallel` False
        makes each call wait for the one before. `surplus_tokens` is explained in `RunOptions`, `compiled` in `graph`.
        Raises TypeError for wrong arguments, ProgramError for a failed call, and what the program raises. An error,
        also Ctrl-C, ends all calls.
        """
        self._check(arguments)
        options = RunOptions(
            sampling or {},
            stream=stream,
            parallel=parallel,
            fork_hint=fork_hint,
            surplus_tokens=surplus_tokens,
            beginnings=self.graph(**arguments).beginnings if compiled else {},
        )
        target = _target(endpoint, base_url, model, api_key)
        return self._begin(arguments, target, options, deadline_s)

    def run_batch(
        self,
        arguments: Sequence[Mapping[str, Any]],
        *,
        base_url: str | None = None,
        model: str | None = None,
        api_key: str | None = None,
        endpoint: Endpoint | None = None,
        sampling: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        parallel: bool = True,
        fork_hint: bool = True,
        surplus_tokens: int = 0,
        num_threads: int = 64,
        progress: bool = True,
        on_error: Literal["raise", "keep"] = "raise",
        prefetch: bool = False,
        compiled: bool = False,
    ) -> list[State]:
        """Runs the program once for each of `arguments`, at most `num_threads` at a time, and shows the progress.

        Returns the states in the order of `arguments`. The first error ends the others and is raised; with `on_error`
        "keep" the others run on, and a state whose program failed has the ProgramError as its `error`. `deadline_s`
        counts for each program from its beginning. `prefetch` has the endpoint compute what `trace` finds the programs
        to share before it runs the first one. `compiled` does so, too, and is explained in `graph`.
        """
        target = _target(endpoint, base_url, model, api_key)
        for each in arguments:
            self._check(each)
        graph = self.graph(**batch_arguments(arguments)) if compiled and arguments else Graph(())
        options = RunOptions(
            sampling or {},
            parallel=parallel,
            fork_hint=fork_hint,
            surplus_tokens=surplus_tokens,
            beginnings=graph.beginnings,
        )
        batch = _Batch(self, target, options, deadline_s, keeps_errors=on_error == "keep")
        if (prefetch or compiled) and len(arguments) > 1:
            prefix = graph.prefix if compiled else self.trace(**batch_arguments(arguments)).prefix
            batch.prefetch(prefix, caller_location())
        with ThreadPoolExecutor(max(1, min(num_threads, len(arguments))), "program") as threads:
            futures = [threads.submit(batch.run, each) for each in arguments]
            try:
                for future in _shown(as_completed(futures), len(futures), self.name, progress=progress):
                    future.result()
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                batch.cancel()
                raise

    def trace(self, **known: Any) -> Trace:
        """Finds the text with which all runs begin whose arguments are `known` or defaults, and what ends it.

        Runs the function, without calls, up to the first thing that another argument or a call decides. A program that
        does other things before its first call, such as writing files, does them here, too.
        """
        return trace(self._function, self._signature, known)

    def graph(self, **known: Any) -> Graph:
        """Traces the function, without calls, into the graph of its steps, up to what depends on a value or on an
        argument that is neither in `known` nor a default. Whatever else the program does before, it does here, too.

        A run with `compiled` traces it first, with its arguments, and has text that all states of a fork begin with
        computed with the prefix of the fork. Steps behind the end of the graph are interpreted as always.
        """
        return graph_of(self._function, with_unknown(self._signature, known))

    def _begin(
        self, arguments: Mapping[str, Any], endpoint: Endpoint, options: RunOptions, deadline_s: float | None
    ) -> State:
        state = State(Run(endpoint, options, deadline_s))
        if not options.stream:
            return self.complete(state, arguments)
        threading.Thread(target=self._complete_quietly, args=(state, arguments), daemon=True).start()
        return state

    def _complete_quietly(self, state: State, arguments: Mapping[str, Any]) -> None:
        """Readers of the text get the error."""
        try:
            self.complete(state, arguments)
        except ProgramError as error:
            state.end(error)
        except BaseException as error:  # also sys.exit(), which ends only this thread
            failure = ProgramError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            state.end(failure)

    def complete(self, state: State, arguments: Mapping[str, Any]) -> State:
        """Runs the program on a new state, and waits for all calls. Any error ends them."""
        begin = time.perf_counter()
        try:
            state.result = self._function(state, **arguments)
            check_forks(state)
            wait_for_calls(state)
        except BaseException:
            state.cancel()
            raise
        finally:
            state.elapsed_s = time.perf_counter() - begin
            state.end_session()
        state.end()
        return state

    def _check(self, arguments: Mapping[str, Any]) -> None:
        """Raises TypeError before anything runs."""
        try:
            self._signature.bind(None, **arguments)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None


class _Batch:
    """The runs of a batch, each in a thread of a pool."""

    def __init__(
        self, each: Program, endpoint: Endpoint, options: RunOptions, deadline_s: float | None, *, keeps_errors: bool
    ) -> None:
        self._program, self._endpoint, self._options, self._deadline_s = each, endpoint, options, deadline_s
        self._keeps_errors = keeps_errors
        self._runs: list[Run] = []
        self._is_cancelled = False
        self._lock = threading.Lock()

    def run(self, arguments: Mapping[str, Any]) -> State:
        run = Run(self._endpoint, self._options, self._deadline_s)
        with self._lock:
            self._runs.append(run)
            if self._is_cancelled:
                run.cancel()
        state = State(run)
        try:
            self._program.complete(state, arguments)
        except ProgramError as error:
            if not self._keeps_errors:
                raise
            state.error = error
        return state

    def prefetch(self, content: Content, location: Location) -> None:
        """Waits until the endpoint has computed `content`. A hint: if the endpoint refuses, the calls
        of the programs report it."""
        if content.is_open:
            # Templates can continue a message of the assistant only. What follows the end of this one is not shared.
            content = content.closed()
        run = Run(self._endpoint, self._options, self._deadline_s)
        asked = run.call("prefetch", location, lambda caller: self._endpoint.prefetch(content, caller))
        future = asyncio.run_coroutine_threadsafe(asked, run.loop)
        try:
            with suppress(ProgramError):
                future.result()
        finally:
            future.cancel()  # if the wait was interrupted

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            for run in self._runs:
                run.cancel()


def program(function: Function) -> Program:
    """Makes a program of a function whose first parameter is the state."""
    return Program(function)


@cache
def _shared(base_url: str | None, model: str | None, api_key: str | None) -> Endpoint:
    """One for all runs with the same arguments, so connections are kept."""
    return Endpoint(base_url, model=model, api_key=api_key)


def _target(endpoint: Endpoint | None, base_url: str | None, model: str | None, api_key: str | None) -> Endpoint:
    if endpoint is None:
        return _shared(base_url, model, api_key)
    if base_url is not None or model is not None or api_key is not None:
        raise TypeError("an endpoint has its own base_url, model and api_key")
    return endpoint


ItemT = TypeVar("ItemT")


def _shown(items: Iterable[ItemT], total: int, title: str, *, progress: bool) -> Iterator[ItemT]:
    """Yields the items, with a progress bar if stderr is a terminal or a notebook."""
    if not progress or total < 2 or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        yield from bar.track(items, total=total, description=title)


_RUN_ARGUMENTS = frozenset(
    name
    for method in (Program.run, Program.run_batch)
    for name, parameter in inspect.signature(method).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)
