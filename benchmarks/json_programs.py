"""Programs over HTTP: answers under JSON schemas by several servers of one model, in turns within one run.

A round asks each server for the same programs, `concurrency` at a time, in an order that turns from round to round. All
servers run during the whole run, and idle but the one that is asked. Whitespace between the tokens of JSON is off on
all of them, since a model with random weights would write it without end.

Each answer is checked against its schema; cut and invalid ones do not count as programs.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from jsonschema import Draft202012Validator

from benchmarks.peers.order import turns
from benchmarks.peers.running_server import RunningServer
from benchmarks.peers.servers import Server, Setting, Variant, make_server

COMPACT_VLLM = '{{"backend":"{backend}","disable_any_whitespace":true}}'
START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 300.0
JUMPS, MASKS = "jump-forward", "masks alone"


@dataclass(slots=True)
class Answers:
    """What one server gave in one round."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_valid: int = 0
    num_cut: int = 0
    invalid: list[str] = field(default_factory=list)

    @property
    def programs_per_s(self) -> float:
        return self.num_valid / self.seconds


@dataclass(frozen=True, slots=True)
class Program:
    """One request. The schema's name is in the prompt, so that all servers get the same text."""

    name: str
    schema: Mapping[str, Any]
    number: int

    def body(self, model: str, max_tokens: int) -> dict[str, Any]:
        described = {"name": "answer", "strict": True, "schema": self.schema}
        return {
            "model": model,
            "messages": [{"role": "user", "content": f"Case {self.number}: describe a {self.name} as JSON."}],
            "response_format": {"type": "json_schema", "json_schema": described},
            "guided_whitespace_pattern": "",  # other servers are started without whitespace
            "temperature": 1.0,
            "seed": self.number,
            "max_tokens": max_tokens,
        }


def variants_of(against: Sequence[str]) -> list[Variant]:
    """Both ways of kvrelay, and others as NAME=URL, `vllm-xgrammar` or `vllm-guidance`."""
    found = [Variant(JUMPS, "kvrelay"), Variant(MASKS, "kvrelay", ("--no-jump-forward",))]
    for text in against:
        name, _, url = text.partition("=")
        if url:
            found.append(Variant(name, url))
            continue
        backend = name.removeprefix("vllm-")
        arguments = ("--structured-outputs-config", COMPACT_VLLM.format(backend=backend))
        found.append(Variant(name, "vllm", arguments))
    return found


@contextmanager
def running(variants: Sequence[Variant], setting: Setting) -> Iterator[dict[str, Server]]:
    """All servers, which serve until the context ends. Raises NotInstalled, ServerFailed."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        servers = {}
        for number, variant in enumerate(variants):
            state_dir = Path(place) / str(number)
            state_dir.mkdir()
            servers[variant.name] = server = make_server(variant, setting, state_dir)
            stack.enter_context(RunningServer(server, Path(place), START_TIMEOUT_S))
        yield servers


def ask_all(server: Server, programs: Sequence[Program], concurrency: int, max_tokens: int) -> Answers:
    """Each of the threads asks over a connection of its own, for the next program once it has an answer."""
    answers, url, own = Answers(), urlsplit(server.url), threading.local()
    model = server.model or _first_model(url.netloc)

    def connect() -> None:
        own.connection = http.client.HTTPConnection(url.netloc, timeout=ANSWER_TIMEOUT_S)

    def ask(program: Program) -> Any:
        body = json.dumps(program.body(model, max_tokens)).encode()
        own.connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = own.connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"{server.name}: status {response.status}: {text[:300]!r}")
        return json.loads(text)

    with ThreadPoolExecutor(concurrency, initializer=connect) as threads:
        started = time.perf_counter()
        replies = list(threads.map(ask, programs))
        answers.seconds = time.perf_counter() - started
    for program, reply in zip(programs, replies, strict=True):
        _check(program, reply, answers)
    return answers


def _check(program: Program, reply: Mapping[str, Any], answers: Answers) -> None:
    choice = reply["choices"][0]
    answers.num_tokens += reply["usage"]["completion_tokens"]
    if choice["finish_reason"] == "length":
        answers.num_cut += 1
        return
    try:
        errors = [error.message for error in Draft202012Validator(program.schema).iter_errors(_loads(choice))]
    except ValueError as error:
        errors = [str(error)]
    if errors:
        answers.invalid.append(f"{program.name}: {errors[0]}"[:200])
    else:
        answers.num_valid += 1


def _loads(choice: Mapping[str, Any]) -> Any:
    return json.loads(choice["message"]["content"] or "")


def _first_model(netloc: str) -> str:
    connection = http.client.HTTPConnection(netloc, timeout=ANSWER_TIMEOUT_S)
    connection.request("GET", "/v1/models")
    return str(json.loads(connection.getresponse().read())["data"][0]["id"])


def compare(
    servers: Mapping[str, Server],
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    concurrency: int,
    rounds: int,
    per_schema: int,
    max_tokens: int,
) -> list[str]:
    """The lines of a table. Raises RuntimeError if a server refuses a request."""
    found: dict[str, list[Answers]] = {name: [] for name in servers}
    for number, names in enumerate(turns(list(servers), rounds + 1, "abba", 0)):
        made = [
            Program(name, schema, 1000 * number + each)
            for each in range(per_schema)
            for name, schema in schemas.items()
        ]
        for name in names:
            answers = ask_all(servers[name], made, concurrency, max_tokens)
            print(
                f"  round {number}, {name}: {answers.programs_per_s:.2f} programs/s", *answers.invalid[:1], flush=True
            )
            if number:  # the first round is for compiled grammars and warm caches
                found[name].append(answers)
    base = np.array([answers.programs_per_s for answers in found[MASKS]])
    return [_line(name, concurrency, answers, base) for name, answers in found.items()]


def _line(name: str, concurrency: int, answers: Sequence[Answers], base: np.ndarray) -> str:
    rates = np.array([each.programs_per_s for each in answers])
    low, middle, high = np.quantile(rates / base, [0.0, 0.5, 1.0])
    num_programs = sum(each.num_valid + each.num_cut + len(each.invalid) for each in answers)
    num_tokens, seconds = sum(each.num_tokens for each in answers), sum(each.seconds for each in answers)
    num_valid, num_cut = sum(each.num_valid for each in answers), sum(each.num_cut for each in answers)
    return (
        f"| {name} | {concurrency} | {np.median(rates):.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) | "
        f"{num_tokens / num_programs:.0f} | {num_tokens / seconds:.0f} | {num_valid} of {num_programs} | {num_cut} |"
    )


HEAD = (
    "| server | at once | programs/s | over masks alone | tokens per answer | tokens/s | valid | cut |",
    "|---|---:|---:|---:|---:|---:|---:|---:|",
)
