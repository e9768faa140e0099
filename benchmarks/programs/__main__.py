"""Programs of several calls through the whole system (`kvrelay up`, HTTP), each section in one run.

    python -m benchmarks.programs [--sections workloads,select] [--workloads all]
        [--write benchmarks/results/programs.md]

- workloads: those of `kvrelay bench --workload` with every part on, each part off, and the same work as raw API calls:
  requests of one script per program, in turn, without session and hints, and a request for each choice of a `select`.
  A stack for each set of server flags runs during the whole section, and variants take turns. Runs on one stack have
  equal texts and different `cache_salt`, so none finds what another one has computed.
- Hit rate: cached prompt tokens / prompt tokens, of all calls with hints and scores. "Of the best" divides by what one
  cache without end would have for the same calls in their order, if it had each prompt and the answer's sampled
  tokens from the request on.
- CPU: that of all processes of the stack and of the client; "saved" is that of raw calls without cache over it. Other
  programs on the machine do not change it, unlike programs/s and latency.
- select: time of a selection by its number of choices.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.interrupts import interruptible
from benchmarks.peers.machine import commit, machine
from benchmarks.programs import selection
from benchmarks.programs.ablation import (
    ALL_ON,
    RAW_NO_CACHE,
    SERVERS,
    VARIANTS,
    Bench,
    Sizes,
    Variant,
    running,
    table,
)
from kvrelay.config.common import demo_model_path
from kvrelay_programs.workloads import find_workload, workloads
from tests.fakes.stack import Stack

SECTIONS = ("workloads", "select")
MAIN, NO_CACHE = "all on", "no cache"


def main() -> None:
    given = _arguments()
    sections = given.sections.split(",")
    names = given.servers.split(",") if "workloads" in sections else [MAIN]
    sizes = Sizes(given.programs, given.concurrency, given.alone, given.rounds, given.num_blocks)
    flags = ["--num-blocks", str(given.num_blocks), "--dtype", "float32", *given.flag]
    with (
        interruptible(),
        tempfile.TemporaryDirectory() as place,
        running(names, given.model, Path(place), flags) as stacks,
    ):
        lines = _head(given, sizes)
        if "workloads" in sections:
            lines += _workloads(given, stacks, sizes)
        if "select" in sections:
            lines += ["## Choices of a select", "", *selection.lines(stacks[MAIN]), ""]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.write:
        given.write.write_text(text, encoding="utf-8")


def _head(given: argparse.Namespace, sizes: Sizes) -> list[str]:
    about = machine()
    name = given.model.name if given.model else "the demo model"
    return [
        f"{about['CPU']}, {about['cores']} cores, {about['instructions']}, CPython {platform.python_version()}, commit "
        f"{commit()}; {name} in float32, one prefill and one decode worker, {sizes.num_blocks} blocks each; "
        f"{sizes.num_programs} programs, {sizes.concurrency} at once; {sizes.rounds} rounds.",
        "",
    ]


def _tokenizer(given: argparse.Namespace) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(given.model or demo_model_path())


def _variants(given: argparse.Namespace) -> list[Variant]:
    """Those that are wanted, and those that others are compared with."""
    if given.variants == "all":
        return list(VARIANTS)
    wanted = {ALL_ON, RAW_NO_CACHE, *given.variants.split(";")}
    return [each for each in VARIANTS if each.name in wanted]


def _workloads(given: argparse.Namespace, stacks: dict[str, Stack], sizes: Sizes) -> list[str]:
    bench = Bench(stacks, _tokenizer(given), sizes, _variants(given))
    lines: list[str] = []
    kept: dict[str, Any] = {}
    for name in workloads() if given.workloads == "all" else given.workloads.split(","):
        batch, alone = bench.measure(find_workload(name))
        lines += [f"### {name}", "", *table(batch, alone), ""]
        print("\n".join(lines[-len(batch) - 5 :]), file=sys.stderr, flush=True)
        kept[name] = {
            kind: {variant: [asdict(each) for each in outcomes] for variant, outcomes in found.items()}
            for kind, found in (("batch", batch), ("alone", alone))
        }
        if given.json:
            given.json.write_text(json.dumps(kept), encoding="utf-8")
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--workloads", default="all", metavar="NAME[,NAME]")
    parser.add_argument(
        "--servers", default=",".join(SERVERS), help="sets of server flags; variants on others are left out"
    )
    parser.add_argument("--variants", default="all", metavar="NAME[;NAME]", help="rows of the workloads' tables")
    parser.add_argument("--programs", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--alone", type=int, default=3, help="programs whose latency is measured one at a time")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-blocks", type=int, default=3000)
    parser.add_argument("--flag", action="append", default=[], help="one more argument of `kvrelay up`; repeatable")
    parser.add_argument("--json", type=Path, help="keeps the outcomes of the workloads")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    if unknown := set(given.sections.split(",")) - set(SECTIONS):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    if unknown := set(given.servers.split(",")) - SERVERS.keys() or {MAIN, NO_CACHE} - set(given.servers.split(",")):
        parser.error(f"--servers names {MAIN}, {NO_CACHE} and further ones of {', '.join(SERVERS)}; see {unknown}")
    names = {each.name for each in VARIANTS} | {"all"}
    if unknown := set(given.variants.split(";")) - names:
        parser.error(f"unknown variants: {'; '.join(sorted(unknown))}")
    return given


if __name__ == "__main__":
    main()
