"""Answers under JSON schemas over HTTP, by kvrelay with jump-forward and with masks alone, and by other servers of the
same model, in turns within one run.

A round asks each server for the same programs, `concurrency` at a time, in an order that turns from round to round. All
servers run during the whole run, and idle but the one that is asked. Whitespace between the tokens of JSON is off on
all of them, since a model with random weights would write it without end. Free strings and numbers are bounded, as a
schema for extraction bounds them. Each answer is checked against its schema; cut and invalid ones do not count.

Usage: python -m benchmarks.json_decoding --model DIR [--against NAME=URL | vllm-xgrammar | vllm-guidance]...
           [--venv vllm=DIR] [--rounds 4] [--write benchmarks/results/json_decoding.md]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
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

from benchmarks.peers.machine import package_versions
from benchmarks.peers.order import turns
from benchmarks.peers.running_server import RunningServer
from benchmarks.peers.servers import Server, Setting, Variant, make_server

MAX_RUNNING = 32
MAX_TOKENS = 400
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


def record(**properties: Any) -> dict[str, Any]:
    """A schema of an object with all of these properties."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def text(max_length: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^[A-Za-z ]{{0,{max_length}}}$"}


AMOUNT = {"type": "integer", "minimum": 0, "maximum": 9999}
ADDRESS = record(street_name=text(12), house_number=AMOUNT, postal_code={"type": "string", "pattern": "^[0-9]{5}$"})
SCHEMAS: dict[str, dict[str, Any]] = {
    "character": record(
        name=text(16),
        house={"enum": ["Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"]},
        blood_status={"enum": ["Pure-blood", "Half-blood", "Muggle-born"]},
        occupation={"enum": ["student", "teacher", "auror", "minister"]},
        is_alive={"type": "boolean"},
    ),
    "city": record(name=text(16), country=text(16), latitude=AMOUNT, population=AMOUNT, top_three_landmarks=text(24)),
    "invoice": record(
        invoice_number=AMOUNT,
        customer=record(full_name=text(16), billing_address=ADDRESS),
        currency={"enum": ["EUR", "USD", "GBP"]},
        total_amount=AMOUNT,
        payment_status={"enum": ["paid", "outstanding", "cancelled"]},
    ),
    "weather call": record(
        tool_name={"const": "get_current_weather"},
        arguments=record(
            location=text(16), unit={"enum": ["celsius", "fahrenheit"]}, include_forecast={"type": "boolean"}
        ),
    ),
    "review": record(
        sentiment={"enum": ["positive", "negative", "neutral"]},
        confidence_percent={"type": "integer", "minimum": 0, "maximum": 100},
        mentions_delivery={"type": "boolean"},
        mentions_price={"type": "boolean"},
        short_summary=text(24),
    ),
}


def measured(given: argparse.Namespace) -> list[str]:
    """The page."""
    cores = sorted(os.sched_getaffinity(0))
    setting = Setting(given.model, cores, 1, max_model_len=2048, max_running=MAX_RUNNING, venvs=dict(given.venv))
    with running(variants_of(given.against), setting) as servers:
        load, rows = os.getloadavg()[0], []
        for concurrency in given.concurrency:
            rows += compare(
                servers,
                SCHEMAS,
                concurrency=concurrency,
                rounds=given.rounds,
                per_schema=max(2, 2 * concurrency // len(SCHEMAS)),
                max_tokens=MAX_TOKENS,
            )
        versions = [package_versions(server.python, server.packages) for server in servers.values()]
    names = {f"{name} {version}" for each in versions for name, version in each.items() if name in ("vllm", "torch")}
    return [
        "# JSON decoding",
        "",
        "Repeat with `python -m benchmarks.json_decoding`; the script's head says what is measured.",
        "",
        f"{platform.machine()} with {len(cores)} cores for the servers and the client (load {load:.0f} when it began), "
        f"the model of {given.model.name} in {setting.dtype} with random weights; {', '.join(sorted(names))}. "
        f"{given.rounds} rounds; medians, and the least and the most of the ratios within a round. All servers get "
        "the same requests, without whitespace between the tokens of JSON. Strings are sampled at temperature 1, so "
        "answers differ between servers in their length; tokens/s compare without that. `jump-forward` and `masks "
        "alone` are kvrelay. vLLM has no jump-forward; its backends are XGrammar and llguidance (`guidance`).",
        "",
        *HEAD,
        *rows,
        "",
    ]


def _venv(text: str) -> tuple[str, Path]:
    peer, _, path = text.partition("=")
    return peer, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--against", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--venv", type=_venv, action="append", default=[], metavar="PEER=DIR")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--concurrency", type=lambda text: list(map(int, text.split(","))), default=[1, 8])
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    written = "\n".join(measured(arguments)).rstrip() + "\n"
    print(written)
    if arguments.write:
        arguments.write.write_text(written)


if __name__ == "__main__":
    main()
