"""Parses and checks the flags of `kvrelay bench`."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.telemetry.plots import NoMatplotlib, check_plot
from kvrelay_bench.http import Endpoint
from kvrelay_bench.load_figures import BenchSlo
from kvrelay_bench.load_generator import LoadPoint
from kvrelay_bench.workload import Arrivals, Ask, Shape, Wire, arrival_times, synthetic, traced
from kvrelay_simulator.traces import TracedRequest, read_trace, scaled

UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
WARM_UP_SEED = 1 << 40
"""Differs from all measured seeds, so the warm-up caches none of their prompts."""


class BenchFlagError(Exception):
    """An invalid flag. The message names it and the allowed values."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The checked flags. `printable` contains the given flags, without keys, for the results."""

    endpoints: Mapping[str, Endpoint]
    model: str
    wire: Wire
    slo: BenchSlo
    rounds: int
    timeout_s: float
    warm_up: Sequence[Ask]
    make_points: Callable[[int], list[LoadPoint]]
    json_path: Path | None
    plot_path: Path | None
    with_requests: bool
    printable: Mapping[str, Any]

    def points(self, round_number: int) -> list[LoadPoint]:
        """The loads of a round, with prompts that no other round has."""
        return self.make_points(round_number)


def read_flags(argv: Sequence[str] | None, environ: Mapping[str, str]) -> BenchPlan:
    """Parses the flags. Raises BenchFlagError, BadTrace; exits the process like argparse."""
    given = _parser().parse_args(argv)
    urls: list[str] = given.compare or ([given.url] if given.url else [])
    if not urls or (given.compare and given.url):
        raise BenchFlagError("give one URL, or --compare with two")
    if given.trace is not None and (given.rate or given.concurrency):
        raise BenchFlagError("--trace has its own arrivals: give --speed, not --rate or --concurrency")
    if given.rate and given.concurrency:
        raise BenchFlagError("--rate and --concurrency exclude each other: give one")
    if given.api == "chat" and given.prompt_as == "ids":
        raise BenchFlagError("--prompt-as ids needs --api completions: chat takes text")
    if given.plot is not None:
        try:
            check_plot(given.plot)
        except (NoMatplotlib, ValueError) as error:
            raise BenchFlagError(str(error)) from error
    key = _api_key(given.api_key_file, environ)
    names = ["A", "B"] if given.compare else [urls[0]]
    wire = Wire(
        api=given.api,
        prompt_as=given.prompt_as or ("text" if given.api == "chat" else "ids"),
        token_ids=given.token_ids,
        ignore_eos=given.ignore_eos,
        include_usage=given.usage,
        extra=given.extra_body,
    )
    shape = Shape(given.prompt_tokens, given.output_tokens, given.spread, given.prefix_tokens, given.prefixes)
    trace = None if given.trace is None else scaled(read_trace(given.trace, given.requests), given.speed)
    return BenchPlan(
        endpoints={name: Endpoint(url, key) for name, url in zip(names, urls, strict=True)},
        model=given.model,
        wire=wire,
        slo=BenchSlo(**dict(given.slo or ())),
        rounds=given.rounds or (3 if given.compare else 1),
        timeout_s=given.timeout,
        warm_up=synthetic(shape, [0.0] * given.warm_up, WARM_UP_SEED),
        make_points=lambda number: _points(given, shape, trace, given.seed + number),
        json_path=given.json,
        plot_path=given.plot,
        with_requests=given.save_requests,
        printable={name: _printable(value) for name, value in vars(given).items() if name != "api_key_file"},
    )


def _points(
    given: argparse.Namespace, shape: Shape, trace: Sequence[TracedRequest] | None, seed: int
) -> list[LoadPoint]:
    """Loads with different prompts, so a prefix cached by one load does not serve the next."""
    if trace is not None:
        return [LoadPoint(f"{given.trace.name} x{given.speed:g}", traced(trace, given.scale, seed << 8))]
    num_requests = given.requests or 100
    arrivals: Arrivals = given.arrivals
    points = []
    for number, concurrency in enumerate(given.concurrency or ()):
        asks = synthetic(shape, [0.0] * num_requests, (seed << 8) + number)
        points.append(LoadPoint(f"{concurrency} at a time", asks, concurrency))
    for number, rate in enumerate(given.rate or (() if points else (1.0,))):
        times = arrival_times(num_requests, rate, arrivals, (seed << 8) + number)
        points.append(LoadPoint(f"{rate:g}/s {arrivals}", synthetic(shape, times, (seed << 8) + number)))
    return points


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay bench",
        description="Sends a load to any OpenAI-compatible endpoint and reports latencies, throughput and goodput.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("url", nargs="?", help="base URL, as in http://127.0.0.1:8000 or .../v1")
    add("--compare", nargs=2, metavar=("A", "B"), help="two URLs to compare, measured in turn")
    add("--rounds", type=_whole(1, 1000), metavar="N", help="repetitions (default: 1; 3 with --compare)")
    add("--model", default="", help="(default: the first one that /v1/models names)")
    add("--api", choices=("completions", "chat"), default="completions", help="(default: completions)")
    add("--api-key-file", type=Path, metavar="FILE", help="(default: KVRELAY_API_KEY or OPENAI_API_KEY, if set)")
    load = parser.add_argument_group("load").add_argument
    load("--rate", type=_list(_number(1e-6, 1e6)), metavar="R[,R...]", help="requests per second (default: 1)")
    load("--arrivals", choices=("poisson", "fixed"), default="poisson", help="spacing of arrivals (default: poisson)")
    load(
        "--concurrency",
        type=_list(_whole(1, 1 << 20)),
        metavar="N[,N...]",
        help="concurrent requests, instead of a rate",
    )
    load("--trace", type=Path, metavar="FILE", help="Mooncake's JSON lines or Azure's CSV, instead of a rate")
    load("--speed", type=_number(1e-6, 1e6), default=1.0, metavar="X", help="speed-up of the trace (default: 1)")
    load(
        "--scale", type=_number(1e-6, 1e3), default=1.0, metavar="X", help="factor for the trace's lengths (default: 1)"
    )
    load("--requests", type=_whole(1, 1 << 24), metavar="N", help="requests per load (default: 100; all of a trace)")
    load(
        "--warm-up",
        type=_whole(0, 1 << 20),
        default=8,
        metavar="N",
        help="requests before the measurement (default: 8)",
    )
    load(
        "--timeout",
        type=_number(1e-3, 86400),
        default=600.0,
        metavar="SECONDS",
        help="timeout of a request (default: 600)",
    )
    load("--seed", type=_whole(0, 1 << 31), default=1, metavar="N", help="seed of prompts and arrivals (default: 1)")
    what = parser.add_argument_group("requests").add_argument
    what(
        "--prompt-tokens", type=_whole(1, 1 << 24), default=200, metavar="N", help="median prompt length (default: 200)"
    )
    what("--output-tokens", type=_whole(1, 1 << 24), default=50, metavar="N", help="median output length (default: 50)")
    what("--spread", type=_number(0, 5), default=0.0, metavar="S", help="log-normal spread of both (default: 0)")
    what("--prefix-tokens", type=_whole(0, 1 << 24), default=0, metavar="N", help="additional shared prefix")
    what("--prefixes", type=_whole(1, 1 << 20), default=1, metavar="N", help="number of shared prefixes (default: 1)")
    what("--prompt-as", choices=("ids", "text"), help="token ids or words (default: ids; text with --api chat)")
    what("--token-ids", type=_range, default=(5, 2000), metavar="LOW:HIGH", help="range of token ids (default: 5:2000)")
    what(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate to the full length (default: on)",
    )
    what("--usage", action=argparse.BooleanOptionalAction, default=True, help="ask for token counts (default: on)")
    what("--extra-body", type=_object, metavar="JSON", help="further fields of each request")
    result = parser.add_argument_group("results").add_argument
    result("--slo", type=_bound, action="append", metavar="NAME=TIME", help="ttft, tpot or e2e, as in ttft=500ms")
    result("--json", type=Path, metavar="FILE", help="write all figures to this file")
    result("--save-requests", action="store_true", help="also write the times of every request to it")
    result("--plot", type=Path, metavar="FILE", help="draw the figures (.svg, .png, .pdf)")
    return parser


def _api_key(path: Path | None, environ: Mapping[str, str]) -> str:
    if path is None:
        return environ.get("KVRELAY_API_KEY") or environ.get("OPENAI_API_KEY") or ""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchFlagError(f"--api-key-file: cannot read {path}: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise BenchFlagError(f"--api-key-file: {path} holds no key")
    return keys[0]


# -- types of flags ---------------------------------------------------------------------------------------------------


def _number(least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number from {least:g} to {most:g}")
        return value

    return read


def _whole(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from {least} to {most}")
        return int(text)

    return read


def _list(read_one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read_one(each.strip()) for each in text.split(",")]


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high) <= 1 << 30):
        raise argparse.ArgumentTypeError(f"{text!r} must be LOW:HIGH, two whole numbers of which the first is smaller")
    return int(low), int(high)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return found


def _bound(text: str) -> tuple[str, float]:
    match = re.fullmatch(r"(ttft|tpot|e2e)=([0-9]*\.?[0-9]+)(us|ms|s|)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be ttft=TIME, tpot=TIME or e2e=TIME, as in ttft=500ms")
    return f"{match[1]}_s", float(match[2]) * UNITS_S[match[3]]


def _printable(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
