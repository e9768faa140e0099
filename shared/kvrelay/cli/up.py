"""`kvrelay up`: runs all services on one machine with a private Redis."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from kvrelay.cli.launch_plan import LOOPBACK, LaunchPlan, make_plan, parse_up_flags, up_parser
from kvrelay.cli.preflight import check_plan, find_models, hold_port, longest_sequence
from kvrelay.cli.stacks import (
    DETACHED,
    DIED,
    READY,
    InstanceLock,
    ProcessState,
    StackState,
    remove_state,
    up_detached,
)
from kvrelay.cli.supervisor import (
    Display,
    RouterReady,
    Service,
    ServiceSpec,
    Supervisor,
    WorkerReady,
    make_display,
)
from kvrelay.config.common import DEMO_MODEL_NAME, is_wildcard, mask_password
from kvrelay.config.loader import (
    ConfigError,
    resolve,
    variable_warnings,
)
from kvrelay.config.up_config import UpConfig
from kvrelay.core_leases import SharedLeases
from kvrelay.flag_parser import CommandFailed, own_command
from kvrelay.fleet import Registry, RegistryError, RegistryUnavailable
from kvrelay.fleet.embedded import EmbeddedRedis, EmbeddedRedisError
from kvrelay.process import describe_exit
from kvrelay.process_identity import own_identity

__all__ = ["up", "up_parser"]

REDIS_POLL_S = 0.5


def up(argv: Sequence[str]) -> int:
    """Runs until stopped. Returns the exit status. Raises CommandFailed, also if a service failed to start."""
    flags = parse_up_flags(argv)
    for warning in variable_warnings(os.environ, for_up=True):
        print(f"kvrelay up: warning: {warning}", file=sys.stderr)
    try:
        with ExitStack() as stack:
            own = resolve(UpConfig, flags, os.environ)
            if own.detach:
                return up_detached(argv, own.state_dir)
            if own.port:  # first, because its message names the other instance
                stack.enter_context(_hold_instance(own, own.port))
            held = stack.enter_context(hold_port(own.host, own.port))
            if not own.port:
                stack.enter_context(_hold_instance(own, held.port))
            given = {**flags, "port": str(held.port)}
            plan = make_plan(given, os.environ)
            if local := find_models(plan, os.environ):
                plan = make_plan({**given, **local}, os.environ)
            check_plan(plan)
            server = None if plan.up.redis_url else stack.enter_context(EmbeddedRedis())
            display = stack.enter_context(make_display(sys.stdout, plain=plan.up.verbose))
            return asyncio.run(_Run(plan, server, display).run())
    except RegistryUnavailable as error:
        url = f"--redis {mask_password(plan.up.redis_url)}: " if plan.up.redis_url else ""
        hint = "; start it, or leave --redis out: kvrelay up then starts its own" if url else ""
        raise CommandFailed(f"{url}{str(error).rstrip('.')}{hint}") from None
    except (EmbeddedRedisError, RegistryError) as error:
        raise CommandFailed(str(error)) from None


# -- the run ----------------------------------------------------------------------------------------------------------


class _Run:
    """One run of `kvrelay up`."""

    def __init__(self, plan: LaunchPlan, server: EmbeddedRedis | None, display: Display) -> None:
        self._plan = plan
        self._server = server
        self._display = display
        self._redis_url = server.url if server else plan.router.redis_url
        self._stop = asyncio.Event()
        self._supervisor: Supervisor | None = None
        self._is_ready = False  # all services were ready once

    async def run(self) -> int:
        """Runs until stopped and returns the exit status. Raises CommandFailed, RegistryError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        registry = Registry(self._redis_url, self._plan.router.redis_prefix)
        watch = None
        try:
            await registry.check_server()
            if self._server:
                self._display.update("redis", READY, f"on {LOOPBACK} port {self._server.port}")
                watch = asyncio.create_task(self._watch_redis(self._server))
            await self._serve(registry)
        finally:
            if watch:
                watch.cancel()
            await registry.close()
        return 0

    async def _serve(self, registry: Registry) -> None:
        self._supervisor = self._make_supervisor(registry)
        self._write_state()
        if note := cores_note(self._plan):
            self._display.note(note)
        self._supervisor.start()
        stop = asyncio.create_task(self._stop.wait())
        ready = asyncio.create_task(self._supervisor.wait_ready())
        try:
            await asyncio.wait([stop, ready], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                self._is_ready = True
                self._write_state()
                if note := cut_note(self._plan, await self._served_length(registry)):
                    self._display.note(note)
                self._display.note(greeting(self._plan))
                await stop
        finally:
            ready.cancel()
            stop.cancel()
            await self._supervisor.stop()

    async def _served_length(self, registry: Registry) -> int | None:
        """The longest sequence in tokens that all workers of this stack take; None if Redis does not answer."""
        own = {name for worker in self._plan.workers for name in worker.started_worker_ids}
        try:
            workers = await registry.list_workers(self._plan.router.model_name)
        except RegistryUnavailable:
            return None
        return min((worker.max_model_len for worker in workers if worker.worker_id in own), default=None)

    def _write_state(self) -> None:
        """Lets `kvrelay status`, `restart`, `stop`, `top`, `drain` and `chat` find this stack; not with `verbose`."""
        own = self._plan.up
        if own.verbose or self._supervisor is None:
            return
        processes = self._supervisor.described()
        if (redis := self._server) is not None:
            processes = (ProcessState("redis", "", redis.pid, READY if redis.poll() is None else DIED), *processes)
        state = StackState(
            pid=os.getpid(),
            identity=own_identity(),
            port=own.port,
            url=self._plan.url,
            model=self._plan.router.model_name,
            redis_url=self._redis_url,
            redis_prefix=self._plan.router.redis_prefix,
            is_ready=self._is_ready,
            processes=processes,
        )
        try:
            state.write(_log_directory(own, own.port))
        except OSError as error:
            self._display.note(f"kvrelay status, restart, stop and drain may not find this stack: {error}")

    def _on_signal(self) -> None:
        """The first signal drains, the second kills."""
        if not self._stop.is_set():
            self._stop.set()
            self._display.note("Stopping: open requests may finish. Press Ctrl-C again to stop at once.")
        elif self._supervisor:
            self._supervisor.kill()

    async def _watch_redis(self, server: EmbeddedRedis) -> None:
        """Restarts Redis when it dies. Requests continue meanwhile, since Redis is advisory."""
        while True:
            await asyncio.sleep(REDIS_POLL_S)
            status = server.poll()
            if status is not None:
                self._display.update("redis", DIED, f"{describe_exit(status)}; restarts")
                try:
                    server.restart()
                except EmbeddedRedisError as error:  # retried, since a full disk may be cleared
                    self._display.update("redis", DIED, str(error))
                else:
                    self._display.update("redis", READY)
                self._write_state()

    def _make_supervisor(self, registry: Registry) -> Supervisor:
        plan = self._plan
        others = []
        leases = self._share_cores()
        metrics_port = (plan.up.metrics_port or 0) + 1
        for worker in plan.workers:
            argv = plan.flags_of(worker)
            if plan.up.metrics_port is not None and len(worker.each_worker()) == 1:
                argv.append(f"--http-port={metrics_port}")
            metrics_port += worker.data_parallel_size
            check = WorkerReady(registry, worker.model_name, worker.started_worker_ids)
            environ = plan.environ_of(worker)
            if leases is not None and worker.worker_id in plan.lending:
                environ |= leases.environ_of(plan.lending.index(worker.worker_id))
            spec = self._spec(worker.role, worker.worker_id, argv, environ, check, worker.drain_timeout_s)
            if leases is not None:
                spec = replace(spec, pass_fds=(leases.descriptor,))
            others.append(Service(spec, self._display, self._write_state))
        host = LOOPBACK if is_wildcard(plan.up.host) else plan.up.host
        expected: Counter[str] = Counter()
        for worker in plan.workers:
            expected[worker.role] += len(worker.started_worker_ids)
        check_http = RouterReady(host, plan.up.port, expected)
        spec = self._spec("router", "router", plan.router_flags, {}, check_http, plan.router.drain_timeout_s)
        return Supervisor(Service(spec, self._display, self._write_state), others)

    def _share_cores(self) -> SharedLeases | None:
        plan = self._plan
        if not plan.lending:
            return None
        shares = [worker.threads or 1 for worker in plan.workers if worker.worker_id in plan.lending]
        others = [worker for worker in plan.workers if worker.worker_id not in plan.lending]
        num_taken = sum((worker.threads or 1) * worker.num_processes for worker in others)
        return SharedLeases(len(os.sched_getaffinity(0)) - num_taken, shares)

    def _spec(
        self,
        service: str,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        check: RouterReady | WorkerReady,
        drain_timeout_s: float,
    ) -> ServiceSpec:
        placed = self._plan.placed.get(name)
        return ServiceSpec(
            where=str(placed) if placed else "",
            name=name,
            role=service,
            argv=[sys.executable, "-m", f"kvrelay_{service}", *argv],
            environ={"KVRELAY_REDIS_URL": self._redis_url, **environ},
            log_path=None if self._plan.up.verbose else self._log_path(name),
            ready=check,
            drain_timeout_s=drain_timeout_s,
        )

    def _log_path(self, name: str) -> Path:
        """Path of a new log. Raises ConfigError."""
        path = _log_directory(self._plan.up, self._plan.up.port) / f"{name}.log"
        try:
            path.write_bytes(b"")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; name another --state-dir") from error
        return path


def _hold_instance(own: UpConfig, port: int) -> InstanceLock:
    if own.verbose:
        return InstanceLock(port, None)
    directory = _log_directory(own, port)
    lock = InstanceLock(port, directory)
    lock.callback(remove_state, directory)
    return lock


def _log_directory(own: UpConfig, port: int) -> Path:
    """Each port has its own directory, so two instances do not share logs. `InstanceLock` creates it."""
    return own.state_dir / str(port)


def cores_note(plan: LaunchPlan) -> str | None:
    """How the workers divide the cores. None if nothing is divided here."""
    threads = {worker.threads or 1 for worker in plan.workers}
    if plan.placed or len(plan.workers) < 2 or len(threads) > 1 or plan.workers[0].backend == "simulated":
        return None
    count = threads.pop()
    text = f"{len(plan.workers)} workers of {count} thread{'s' if count > 1 else ''} each"
    if plan.lending:
        text += ", more while others have nothing to do"
    return text


def cut_note(plan: LaunchPlan, served: int | None) -> str | None:
    """A note if sequences of up to `served` tokens are shorter than those of the model, or than was asked for."""
    worker = plan.workers[0]
    wanted = worker.max_model_len or longest_sequence(worker.model)
    if served is None or wanted is None or worker.backend == "simulated" or served >= wanted:
        return None
    return (
        f"max_model_len is cut from {wanted} to {served} tokens, by the pool's size or the model's positions: "
        f"raise --kv-memory-bytes if the pool is too small (the workers' logs say what is), or set --max-model-len"
    )


def greeting(plan: LaunchPlan) -> str:
    """The URL, an example request, and commands for this stack that work from the current directory."""
    model = plan.router.model_name
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is an otter?"}]})
    command, stack = own_command(), _stack_flags(plan.up)
    stop = f"{command} stop{stack}" if os.environ.get(DETACHED) else "Ctrl-C"
    lines = [
        "",
        f"Serving {model} at {plan.url}/v1 ({stop} stops it). Try:",
        "",
        f"  curl {plan.url}/v1/chat/completions \\",
        "    -H 'Content-Type: application/json' \\",
    ]
    if plan.router.api_keys:
        lines.append('    -H "Authorization: Bearer $KVRELAY_API_KEY" \\')
    body = body.replace("'", "'\\''")
    lines += [f"    -d '{body}'", ""]
    if plan.up.verbose:
        return "\n".join([*lines, f"Dashboard: {plan.url}/dashboard", ""])
    lines += [
        f"  dashboard  {plan.url}/dashboard",
        f"  terminal   {command} top{stack}",
        f"  chat       {command} chat{stack}",
        f"  benchmark  {command} bench {plan.url} --concurrency 4 --requests 40",
        f"  logs       {_log_directory(plan.up, plan.up.port)}",
    ]
    if model == DEMO_MODEL_NAME:
        lines += ["", f"{model} is a small model for trials; another: {command} up MODEL"]
    if not plan.up.state_dir.is_absolute():
        state_dir = shlex.quote(str(plan.up.state_dir.absolute()))
        elsewhere = f"{own_command(from_anywhere=True)} top --port {plan.up.port} --state-dir {state_dir}"
        lines += ["", f"From another directory: {elsewhere}"]
    return "\n".join([*lines, ""])


def _stack_flags(own: UpConfig) -> str:
    """The flags by which other commands find the stack."""
    is_default = own.state_dir == UpConfig.model_fields["state_dir"].default
    return f" --port {own.port}" + ("" if is_default else f" --state-dir {shlex.quote(str(own.state_dir))}")
