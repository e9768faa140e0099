"""Parses and checks the flags of `kvrelay bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.flag_parser import CommandFailed, FlagParser, list_of, number, objective, result_file, seconds, whole
from kvrelay_bench.conversations import Conversation, read_conversations
from kvrelay_bench.http import Endpoint
from kvrelay_bench.load_figures import BenchSlo
from kvrelay_bench.load_generator import LoadPoint
from kvrelay_bench.traces import TracedRequest, read_trace, scaled
from kvrelay_bench.workload import Api, Arrivals, Ask, Shape, Wire, arrival_times, from_conversations, synthetic, traced

WARM_UP_SEED = 1 << 40
"""Differs from all measured seeds, so the warm-up caches none of their prompts."""
DEFAULT_DURATION_S = 15.0
"""Seconds of a load without --requests."""
DEFAULT_CONCURRENCY = 4
DEFAULT_OUTPUT_TOKENS = 50
REQUESTS_PER_CLIENT = 50
"""At most so many requests for each of `--concurrency`, without --requests."""

ADVICE = {
    "--workload": "write --workload NAME with the flags of programs alone (see docs/programs.md)",
    "--goodput": "write --slo ttft=500ms --slo tpot=50ms",
    "--base-url": "the URL is the first argument",
    "--host": "the URL is the first argument: http://HOST:PORT",
    "--port": "the URL is the first argument: http://HOST:PORT",
    "--backend": "any OpenAI-compatible endpoint is measured; --api chooses completions or chat",
    "--endpoint": "write --api chat or --api completions",
    "--dataset-name": "write --prompts FILE for conversations, --trace FILE for arrivals and lengths",
    "--save-result": "write --json FILE",
    "--result-filename": "write --json FILE",
    "--num-warmups": "write --warm-up N",
    "--burstiness": "write --arrivals poisson or fixed",
}
"""Flags of other programs that measure endpoints."""


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
    with_requests: bool
    printable: Mapping[str, Any]

    def points(self, round_number: int) -> list[LoadPoint]:
        """The loads of a round, with prompts that no other round has."""
        return self.make_points(round_number)


def read_flags(argv: Sequence[str], environ: Mapping[str, str]) -> BenchPlan:
    """Parses the flags. Raises CommandFailed, BadTrace; exits the process like argparse."""
    given = bench_parser().parse(argv)
    urls: list[str] = given.compare or ([given.url] if given.url else [])
    if not urls or (given.compare and given.url):
        raise CommandFailed("give one URL, or --compare with two", 2)
    _check_together(given)
    key = api_key(given.api_key_file, environ)
    names = ["A", "B"] if given.compare else [urls[0]]
    api: Api = given.api or ("completions" if given.prompts is None else "chat")
    wire = Wire(
        api=api,
        prompt_as=given.prompt_as or ("text" if api == "chat" else "ids"),
        token_ids=given.token_ids,
        ignore_eos=given.ignore_eos,
        extra=given.extra_body,
    )
    trace = None if given.trace is None else scaled(read_trace(given.trace, given.requests), given.speed)
    conversations = None if given.prompts is None else read_conversations(given.prompts, "--prompts")
    return BenchPlan(
        endpoints={name: Endpoint(url, key) for name, url in zip(names, urls, strict=True)},
        model=given.model,
        wire=wire,
        slo=BenchSlo(**{f"{name}_s": bound for name, bound in given.slo or ()}),
        rounds=given.rounds or (3 if given.compare else 1),
        timeout_s=given.timeout,
        warm_up=synthetic(_shape(given), [0.0] * given.warm_up, WARM_UP_SEED),
        make_points=lambda number: _points(given, trace, conversations, number),
        json_path=given.json,
        with_requests=given.save_requests,
        printable={name: _printable(value) for name, value in vars(given).items() if name != "api_key_file"},
    )


def _check_together(given: argparse.Namespace) -> None:
    """Raises CommandFailed for flags that exclude each other."""
    if given.trace is not None and (given.rate or given.concurrency or given.prompts):
        raise CommandFailed(
            "--trace has its own arrivals and prompts: give --speed, not --rate, --concurrency or --prompts", 2
        )
    if given.rate and given.concurrency:
        raise CommandFailed("--rate and --concurrency exclude each other: give one", 2)
    if (given.api or "completions") == "chat" and given.prompt_as == "ids":
        raise CommandFailed("--prompt-as ids needs --api completions: chat takes text", 2)
    if given.prompts is not None and given.prompt_as == "ids":
        raise CommandFailed("--prompts has text: leave --prompt-as ids out", 2)


def _shape(given: argparse.Namespace) -> Shape:
    num_output = given.output_tokens or DEFAULT_OUTPUT_TOKENS
    return Shape(given.prompt_tokens, num_output, given.spread, given.prefix_tokens, given.prefixes)


def _points(
    given: argparse.Namespace,
    trace: Sequence[TracedRequest] | None,
    conversations: Sequence[Conversation] | None,
    round_number: int,
) -> list[LoadPoint]:
    """Loads with different prompts, so a prefix cached by one load does not serve the next."""
    seed = given.seed + round_number
    duration_s = given.duration
    if trace is not None:
        asks = traced(trace, given.scale, seed << 8)
        return [LoadPoint(f"{given.trace.name} x{given.speed:g}", asks, duration_s=duration_s)]
    if given.requests is None and duration_s is None:
        duration_s = DEFAULT_DURATION_S
    concurrencies = given.concurrency or ([] if given.rate else [DEFAULT_CONCURRENCY])
    loads: list[tuple[str, int | None, Sequence[float]]] = [
        (f"{count} at a time", count, [0.0] * (given.requests or REQUESTS_PER_CLIENT * count))
        for count in concurrencies
    ]
    arrivals: Arrivals = given.arrivals
    for place, rate in enumerate(given.rate or ()):
        num_requests = given.requests or max(1, round(rate * (duration_s or DEFAULT_DURATION_S)))
        times = arrival_times(num_requests, rate, arrivals, (seed << 8) + place)
        loads.append((f"{rate:g}/s {arrivals}", None, list(times)))
    points, num_before = [], 0
    for place, (name, concurrency, times_s) in enumerate(loads):
        if conversations is not None:
            first = num_before + round_number * sum(len(each) for _, _, each in loads)
            asks = from_conversations(conversations, times_s, first, given.output_tokens)
            num_before += len(times_s)
        else:
            asks = synthetic(_shape(given), times_s, (seed << 8) + place)
        is_distinct = conversations is None and not given.prefix_tokens
        points.append(LoadPoint(name, asks, concurrency, duration_s, is_distinct))
    return points


def bench_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay bench",
        "Sends a load to any OpenAI-compatible endpoint and reports latencies, throughput and goodput. Without a load: "
        f"{DEFAULT_CONCURRENCY} requests at a time for {DEFAULT_DURATION_S:g} seconds, "
        f"{REQUESTS_PER_CLIENT * DEFAULT_CONCURRENCY} requests at most. Ctrl-C ends the run with the figures of "
        "what has finished.",
        usage="kvrelay bench URL [flags]  or  kvrelay bench --compare URL URL [flags]",
        advice=ADVICE,
    )
    _add_endpoint_flags(parser)
    _add_load_flags(parser)
    _add_request_flags(parser)
    result = parser.add_argument_group("results").add_argument
    result(
        "--slo",
        type=objective("ttft", "tpot", "e2e"),
        action="append",
        metavar="NAME=TIME",
        help="ttft, tpot or e2e, as in ttft=500ms; repeat for several",
    )
    result("--json", type=result_file, metavar="FILE", help="write all figures to this file")
    result("--save-requests", action="store_true", help="also write the times of every request to it")
    return parser


def _add_endpoint_flags(parser: FlagParser) -> None:
    add = parser.add_argument_group("endpoint").add_argument
    add("url", metavar="URL", nargs="?", help="base URL, as in http://127.0.0.1:8000 or .../v1")
    add("--compare", nargs=2, metavar="URL", help="two URLs to compare, measured in turn")
    add("--rounds", type=whole(1, 1000), metavar="N", help="repetitions (default: 1; 3 with --compare)")
    add("--model", default="", metavar="NAME", help="(default: the first one that /v1/models names)")
    add("--api", choices=("completions", "chat"), help="(default: completions; chat with --prompts)")
    add("--api-key-file", type=Path, metavar="FILE", help="(default: KVRELAY_API_KEY or OPENAI_API_KEY, if set)")


def _add_load_flags(parser: FlagParser) -> None:
    load = parser.add_argument_group("load").add_argument
    load(
        "--rate",
        "--request-rate",
        type=list_of(number(1e-6, 1e6)),
        metavar="R[,R...]",
        help="requests per second, one load after the other",
    )
    load("--arrivals", choices=("poisson", "fixed"), default="poisson", help="spacing of arrivals (default: poisson)")
    load(
        "--concurrency",
        "--max-concurrency",
        type=list_of(whole(1, 1 << 20)),
        metavar="N[,N...]",
        help=f"concurrent requests, instead of a rate (default: {DEFAULT_CONCURRENCY})",
    )
    load("--trace", type=Path, metavar="FILE", help="Mooncake's JSON lines or Azure's CSV, instead of a rate")
    load("--speed", type=number(1e-6, 1e6), default=1.0, metavar="X", help="speed-up of the trace (default: 1)")
    load(
        "--scale", type=number(1e-6, 1e3), default=1.0, metavar="X", help="factor for the trace's lengths (default: 1)"
    )
    load(
        "--requests",
        "--num-prompts",
        type=whole(1, 1 << 24),
        metavar="N",
        help="requests per load (default: as many as --duration allows; all of a trace)",
    )
    load(
        "--duration",
        type=seconds,
        metavar="TIME",
        help=f"begin no request after this time of a load, as in 30s (default: {DEFAULT_DURATION_S:g}s; no limit with "
        "--requests or --trace)",
    )
    load("--warm-up", type=whole(0, 1 << 20), default=8, metavar="N", help="requests before the loads (default: 8)")
    load("--timeout", type=seconds, default=600.0, metavar="TIME", help="timeout of a request (default: 10min)")
    load("--seed", type=whole(0, 1 << 31), default=1, metavar="N", help="seed of prompts and arrivals (default: 1)")


def _add_request_flags(parser: FlagParser) -> None:
    what = parser.add_argument_group("requests").add_argument
    what(
        "--prompts",
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="conversations as prompts: ShareGPT or Alpaca JSON, MT-Bench JSON lines, or lines with `messages` or "
        "`prompt`; one request per user turn whose history is in the file",
    )
    what(
        "--prompt-tokens",
        "--random-input-len",
        type=whole(1, 1 << 24),
        default=200,
        metavar="N",
        help="median prompt length (default: 200)",
    )
    what(
        "--output-tokens",
        "--random-output-len",
        type=whole(1, 1 << 24),
        metavar="N",
        help=f"median output length (default: {DEFAULT_OUTPUT_TOKENS}; of --prompts, about that of the file's answers)",
    )
    what("--spread", type=number(0, 5), default=0.0, metavar="S", help="log-normal spread of both (default: 0)")
    what(
        "--prefix-tokens", type=whole(0, 1 << 24), default=0, metavar="N", help="additional shared prefix (default: 0)"
    )
    what("--prefixes", type=whole(1, 1 << 20), default=1, metavar="N", help="number of shared prefixes (default: 1)")
    what("--prompt-as", choices=("ids", "text"), help="token ids or words (default: ids; text with --api chat)")
    what("--token-ids", type=_range, default=(5, 2000), metavar="LOW:HIGH", help="range of token ids (default: 5:2000)")
    what(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,  # because argparse would add the default to the help once more
        help="generate to the full length (default: on)",
    )
    parser.set_defaults(ignore_eos=True)
    what("--extra-body", type=_object, metavar="JSON", help="further fields of each request")


def api_key(path: Path | None, environ: Mapping[str, str]) -> str:
    if path is None:
        return environ.get("KVRELAY_API_KEY") or environ.get("OPENAI_API_KEY") or ""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"--api-key-file: cannot read {path}: {error}", 2) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise CommandFailed(f"--api-key-file: {path} holds no key", 2)
    return keys[0]


# -- types of flags ---------------------------------------------------------------------------------------------------


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


def _printable(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
