"""Compares kvrelay with other servers: same model, same load, same client, one server at a time, in turns.

    python -m benchmarks.peers --model DIR --venv vllm=DIR --json runs/small.jsonl --write page.md
    python -m benchmarks.peers --model DIR --case disaggregation --servers kvrelay,kvrelay-pd --json runs/long.jsonl
    python -m benchmarks.peers --from runs/small.jsonl runs/long.jsonl --write benchmarks/results/peers.md

Servers: kvrelay (one worker), kvrelay-pd (a prefill and a decode worker), vllm, vllm-pd (over NIXL), transformers,
llama, and any running server as NAME=URL. Ctrl-C ends the run and keeps what was measured.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.interrupts import interruptible
from benchmarks.peers.cases import Disaggregation, PeerCase, Throughput
from benchmarks.peers.machine import commit, machine
from benchmarks.peers.order import turns
from benchmarks.peers.page import page
from benchmarks.peers.results import BadResults, Result, ResultFile, Run, read_run
from benchmarks.peers.runner import Limits, MakeServer, Runner, say
from benchmarks.peers.servers import KINDS, NotInstalled, Setting, Variant, make_server

PEER_PROGRAMS = {"vllm": "vllm", "vllm-pd": "vllm", "transformers": "transformers"}
MIN_REQUESTS = 8
REQUESTS_PER_SLOT = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 if nothing was measured; 130 after Ctrl-C; 2 for invalid flags."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        if given.from_files:
            _show([read_run(path) for path in given.from_files], given.write)
            return 0
        return _measure(given, parser, sys.argv[1:] if argv is None else argv)
    except (BadResults, OSError) as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 2


def _measure(given: argparse.Namespace, parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    case = _case(given, parser)
    setting = Setting(
        given.model,
        sorted(os.sched_getaffinity(0)),
        given.kv_gib,
        given.max_model_len,
        given.max_running,
        given.dtype,
        dict(given.venv),
        given.gguf,
    )
    variants = _variants(given, setting, parser)
    base = given.base or variants[0].name
    if base not in [each.name for each in variants]:
        parser.error(f"--base {base} is none of the servers")
    run = Run(_about(given, case, [each.name for each in variants], base, argv))
    kept = ResultFile(given.json, run.about) if given.json else None

    def report(result: Result) -> None:
        run.results.append(result)
        if kept is not None:
            kept.add(result)

    makers: dict[str, MakeServer] = {each.name: partial(make_server, each, setting) for each in variants}
    ends_at = time.monotonic() + given.limit_s if given.limit_s else math.inf
    runner = Runner(case, makers, Limits(given.start_timeout_s, given.request_timeout_s, ends_at), report)
    interrupted = _run_rounds(runner, turns(list(makers), given.rounds, given.order, given.seed))
    _show([run], given.write)
    return 130 if interrupted else 0 if run.measurements else 1


def _run_rounds(runner: Runner, rounds: Sequence[Sequence[str]]) -> bool:
    """Returns whether it was interrupted."""
    with interruptible():
        try:
            runner.run(rounds)
        except KeyboardInterrupt:
            say("interrupted: the page has what was measured")
            return True
    return False


def _show(runs: Sequence[Run], path: Path | None) -> None:
    """Prints the page, or writes it."""
    if path is None:
        print(page(runs))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(runs), encoding="utf-8")
    say(f"wrote {path}")


def _about(
    given: argparse.Namespace, case: PeerCase, servers: Sequence[str], base: str, argv: Sequence[str]
) -> dict[str, Any]:
    return {
        "case": case.name,
        "load": case.about,
        "model": given.title or (given.model.name if given.model else "running servers"),
        "servers": list(servers),
        "base": base,
        "num_rounds": given.rounds,
        "order": given.order,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "commit": commit(),
        "command": _shown_command(given, argv),
    }


def _shown_command(given: argparse.Namespace, argv: Sequence[str]) -> str:
    """The command, with folders of this machine as placeholders."""
    line = shlex.join(["python", "-m", "benchmarks.peers", *argv])
    folders = {str(given.model): "MODEL"} | {str(path): f"{peer.upper()}_VENV" for peer, path in given.venv}
    folders |= {
        str(path.parent): "FOLDER" for path in (given.json, given.write) if path is not None and path.is_absolute()
    }
    for folder, placeholder in folders.items():
        line = line.replace(folder, placeholder)
    return line


def _case(given: argparse.Namespace, parser: argparse.ArgumentParser) -> PeerCase:
    if given.case == "disaggregation":
        return Disaggregation(
            given.decodes, given.decode_tokens, given.long, given.num_long, given.long_interval_s, given.seed
        )
    if given.rate and given.concurrency:
        parser.error("--rate and --concurrency exclude each other")
    concurrency = [] if given.rate else given.concurrency or [1, 8, 32]
    loads = given.rate or concurrency
    counts = given.requests or [max(MIN_REQUESTS, math.ceil(REQUESTS_PER_SLOT * each)) for each in loads]
    if len(counts) != len(loads):
        parser.error(f"--requests needs {len(loads)} numbers, one per load")
    return Throughput(given.prompt_tokens, given.output_tokens, concurrency, given.rate or [], counts, given.seed)


def _variants(given: argparse.Namespace, setting: Setting, parser: argparse.ArgumentParser) -> list[Variant]:
    """Named servers, else kvrelay in both forms and all installed peers; then --variant."""
    named = given.servers
    if named is None:
        named = [] if given.variant else ["kvrelay", "kvrelay-pd", *_installed(setting)]
    variants = [Variant(*each.split("=", 1)) if "=" in each else Variant(each, each) for each in named]
    variants += given.variant
    names = [each.name for each in variants]
    if len(set(names)) < len(names):
        parser.error(f"servers need different names: {', '.join(names)}")
    for each in variants:
        if each.kind not in KINDS and not re.match(r"https?://", each.kind):
            parser.error(f"{each.kind!r} is no kind of server: {', '.join(KINDS)}, or NAME=URL")
    if given.model is None and any(each.kind in KINDS for each in variants):
        parser.error("--model is needed to start servers")
    return variants


def _installed(setting: Setting) -> list[str]:
    found = []
    for kind, program in PEER_PROGRAMS.items():
        # kvrelay's own environment has the program `transformers`, without what its server needs.
        if kind == "transformers" and kind not in setting.venvs:
            continue
        try:
            setting.program(kind.removesuffix("-pd"), program)
        except NotInstalled:
            continue
        found.append(kind)
    return [*found, *(["llama"] if setting.gguf else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="directory of the model, which all servers load")
    add("--title", help="name of the model in the page (default: the directory's name)")
    add("--servers", type=_names, metavar="NAME[,NAME...]", help="(default: kvrelay, kvrelay-pd, installed peers)")
    add("--variant", type=_variant, action="append", default=[], metavar="'NAME=KIND ARGS'", help="with more arguments")
    add("--venv", type=_venv, action="append", default=[], metavar="PEER=DIR", help="virtual environment of a peer")
    add("--gguf", type=Path, help="the model for llama.cpp's server")
    add("--base", help="server to which the ratios are taken (default: the first)")
    add("--rounds", type=int, default=3)
    add("--order", choices=("abba", "random"), default="abba")
    add("--seed", type=int, default=0)
    add("--limit-s", type=float, help="end the run after this many seconds and keep what was measured")
    add("--start-timeout-s", type=float, default=300.0)
    add("--request-timeout-s", type=float, default=300.0)
    add("--dtype", default="bfloat16")
    add("--kv-gib", type=int, default=2, help="KV memory of each instance in GiB")
    add("--max-model-len", type=int, default=8192)
    add("--max-running", type=int, default=64)
    add("--json", type=Path, metavar="FILE", help="keeps each result as a JSON line")
    add("--write", type=Path, metavar="FILE", help="the Markdown page (default: standard output)")
    add("--from", dest="from_files", type=Path, nargs="+", metavar="FILE", help="make the page from --json files")
    load = parser.add_argument_group("load").add_argument
    load("--case", choices=("throughput", "disaggregation"), default="throughput")
    load("--prompt-tokens", type=int, default=512)
    load("--output-tokens", type=int, default=64)
    load("--concurrency", type=_list(int), metavar="N[,N...]", help="closed loops (default: 1,8,32)")
    load("--rate", type=_list(float), metavar="R[,R...]", help="open loops in requests per second")
    load("--requests", type=_list(int), metavar="N[,N...]", help="per load (default: 3 per concurrency, at least 8)")
    load("--decodes", type=int, default=8, help="running decodes of --case disaggregation")
    load("--decode-tokens", type=int, default=400, help="output tokens of each")
    load("--long", type=_list(int), default=[0, 1024, 4096], metavar="N[,N...]", help="lengths of long prompts")
    load("--num-long", type=int, default=4)
    load("--long-interval-s", type=float, default=1.5)
    return parser


def _list(kind: type[int] | type[float]) -> Any:
    return lambda text: [kind(each) for each in text.split(",")]


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",")]


def _variant(text: str) -> Variant:
    name, _, rest = text.partition("=")
    kind, *arguments = shlex.split(rest) or [""]
    return Variant(name, kind, tuple(arguments))


def _venv(text: str) -> tuple[str, Path]:
    name, found, folder = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} must be PEER=FOLDER")
    return name, Path(folder)


if __name__ == "__main__":
    raise SystemExit(main())
