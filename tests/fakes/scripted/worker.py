"""A real worker whose model follows a script: `python -m tests.fakes.scripted.worker prefill|decode FLAGS`.

The script stands in the file KVRELAY_TEST_SCRIPT, see `script.py`. Everything but the device is real. The product has
no such switch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tokenizers import Tokenizer

from kvrelay.config import WorkerConfig, load_config
from kvrelay.config.worker import Role
from kvrelay.engine.masks.model_grammars import make_grammar_compiler
from kvrelay.process import service_main
from kvrelay.simulated.simulated_model import read_facts
from kvrelay.simulated.simulated_runner import make_simulated_runner
from kvrelay.worker.shell import run_workers
from kvrelay_decode.__main__ import make_role as make_decode_role
from kvrelay_prefill.__main__ import make_role as make_prefill_role
from tests.fakes.scripted.model import TURN
from tests.fakes.scripted.runner import ScriptedRunner
from tests.fakes.scripted.script import Script


def make_runner(config: WorkerConfig, *, hands_over: bool = True) -> ScriptedRunner:
    vocabulary = read_facts(config.model).vocabulary
    return ScriptedRunner(
        make_simulated_runner(config),
        vocabulary,
        Tokenizer.from_file(str(Path(config.model) / "tokenizer.json")),
        Script.read(Path(os.environ["KVRELAY_TEST_SCRIPT"]), TURN),
        make_grammar_compiler(config.model, vocabulary.size, vocabulary.eos_ids),
    )


def main(role: Role) -> int:
    return service_main(
        f"scripted {role}",
        f"scripted {role} worker",
        lambda: load_config(WorkerConfig, role=role),
        lambda config: run_workers(config, make_prefill_role if role == "prefill" else make_decode_role, make_runner),
        lambda config: {"worker_id": config.worker_id},
    )


if __name__ == "__main__":
    raise SystemExit(main("prefill" if sys.argv.pop(1) == "prefill" else "decode"))
