"""What a GPU run does, the most important first: each step in a process of its own, within its time."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

PARTS = Path(__file__).parent / "parts"
_NEVER_RAN = "e4m3 or e5m2 or fp8 or 8_bits or window or mistral or gemma or invariant or constrained or launch"
_PROCESSES = 4  # of pytest on one GPU, each with a context of CUDA
_ALONE = tuple(f"tests/gpu/test_{name}.py" for name in ("graphs", "memory", "sharing"))
"""Test files that watch the device's memory, which others at the same time would change."""
_SYSTEMS = "tests/gpu/test_handoff.py"
_SMOKE_TESTS = ("tests/gpu/test_seeds.py", "-k", "cpu")
_PLUGINS = ("-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "benchmarks.gpu.outcomes")
SMOKE_LIMIT_S = 600.0


@dataclass(frozen=True)
class Step:
    """`limit_s`: seconds that it may take. `tests`: pytest's arguments; None: it is a part, of the same name unless
    `part` names it, with this `argument`. `always`: every run does it anew."""

    name: str
    title: str
    limit_s: float
    tests: tuple[str, ...] | None = None
    always: bool = False
    part: str = ""
    argument: str = ""

    @property
    def about(self) -> str:
        """What stands above the step's tables; without importing the part."""
        if self.tests is not None:
            return f"`pytest {' '.join(self.tests)}`, but for what passed in an earlier step."
        if self.name == "check":
            return "Packages that tests and parts import, and FlashInfer's compiled modules that they ask for."
        source = ast.parse((PARTS / f"{self.part or self.name}.py").read_text(encoding="utf-8"))
        assigned = (node for node in source.body if isinstance(node, ast.Assign))
        (found,) = (node.value for node in assigned if ast.unparse(node.targets[0]) == "ABOUT")
        return str(ast.literal_eval(found))

    def command(self, *, device: str, smoke: bool, out: Path, limit_s: float, passed: list[str]) -> list[str]:
        """`passed`: ids of tests to leave out."""
        if self.tests is not None:
            chosen = _SMOKE_TESTS if smoke else self.tests
            command = [sys.executable, "-m", "pytest", "-v", "--tb=short", *_PLUGINS, *chosen]
            return [*command, *(f"--deselect={test}" for test in passed)]
        if self.name == "check":
            return [sys.executable, "-m", "benchmarks.gpu.prepare", "check", "--device", device]
        flags = ["--device", device, "--out", str(out), *(["--smoke"] if smoke else [])]
        return [sys.executable, "-m", "benchmarks.gpu", "--child", self.name, "--limit", f"{limit_s:g}", *flags]


_GPU = ("-m", "gpu")
_SIDE_BY_SIDE = ("-n", str(_PROCESSES)) if importlib.util.find_spec("xdist") else ()
_ALL = (*_GPU, *_SIDE_BY_SIDE, "tests/gpu")
STEPS = (
    Step("check", "What is there", 60, always=True),
    Step("floors", "What the device does", 45, always=True),
    Step("parity", "Tokens and logits beside transformers'", 90, (*_GPU, *_SIDE_BY_SIDE, "tests/gpu/test_engine.py")),
    Step("new-tests", "Tests of 8-bit KV, windows, soft caps, grammars, equal bits and launching ahead", 120,
         (*_ALL, "-k", _NEVER_RAN)),
    Step("systems", "Tests of whole systems", 150, (*_GPU, *_SIDE_BY_SIDE, _SYSTEMS)),
    Step("tests", "All other tests", 120, (*_ALL, *(f"--ignore={file}" for file in (_SYSTEMS, *_ALONE)))),
    Step("memory-tests", "Tests of graphs and of memory", 90, (*_GPU, *_ALONE)),
    Step("transfer", "Blocks between two processes", 45),
    Step("handoff", "What of a handoff is exposed", 120),
    Step("decode", "Decoding", 60),
    Step("gaps", "Between steps", 75),
    Step("prefill", "Prefill", 40),
    Step("kernels", "What kernels take", 45),
    Step("peers", "Beside transformers' continuous batching", 90),
    Step("throughput", "256 requests at once", 90),
    Step("serving", "Beside published points", 140),
    Step("limits", "Limits that were guessed", 75),
    Step("predicted", "The simulator's prediction", 120, part="serving", argument="predicted"),
    Step("decode-8-bit", "Decoding over KV in 8 bits", 60, part="decode", argument="fp8_e4m3"),
)  # fmt: skip
BY_NAME = {step.name: step for step in STEPS}
