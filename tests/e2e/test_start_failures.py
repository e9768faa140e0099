"""Starts of `kvrelay up` that fail: one message says what and what to do, and no process is left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.cli.stacks import running_stacks
from kvrelay.config.common import demo_model_path
from kvrelay.fleet.embedded import EmbeddedRedis
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def failed_start(tmp_path: Path, *flags: str) -> tuple[int, str]:
    state_dir = tmp_path / "state"
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay", "up", "--port=0", f"--state-dir={state_dir}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert running_stacks(state_dir) == []
    return done.returncode, done.stdout


@pytest.fixture
def model(tmp_path: Path) -> Path:
    demo = demo_model_path()
    assert demo is not None
    return Path(shutil.copytree(demo, tmp_path / "model"))


def test_a_model_without_weights(model: Path, tmp_path: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    code, output = failed_start(tmp_path, str(model))
    assert code == 2
    assert output.startswith(f"kvrelay up: --model {model}: the directory has no model.safetensors")
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--curve-key-file={file}"], "{file} holds a line that is no key: `kvrelay keys FILE` makes one"),
        (["--redis=redis://h:1", "--redis-password-file={file}.none"], "cannot read {file}.none: "),
        (["--redis=rediss://h:1/0?ssl_ca_certs={file}"], "ssl_ca_certs: {file} holds no certificate"),
        (["--api-keys-file={file}.none"], "cannot read {file}.none: "),
    ],
)
def test_a_broken_file_of_secrets_is_named_before_anything_starts(tmp_path: Path, flags: list[str], says: str) -> None:
    path = tmp_path / "file"
    path.write_text("what it should not hold\n")
    code, output = failed_start(tmp_path, *(flag.format(file=path) for flag in flags))
    assert code == 2 and output.count("\n") == 1
    assert says.format(file=path) in output and "what it should not hold" not in output


def test_a_second_worker_with_one_id_ends_with_one_line(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    flags = ("--redis", redis_server.url, "--backend", "simulated")
    with Stack(DEMO_MODEL, tmp_path / "state", *flags) as stack:
        (first,) = stack.workers("decode")
        worker_id = first["worker_id"]
        second = subprocess.run(
            [sys.executable, "-m", "kvrelay", "decode", f"--worker-id={worker_id}", "--backend=simulated"],
            env={**os.environ, "KVRELAY_REDIS_URL": redis_server.url},
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert [each["incarnation"] for each in stack.workers("decode")] == [first["incarnation"]]
    (error,) = [line for line in second.stderr.splitlines() if " ERROR " in line]
    assert second.returncode == 1
    assert re.search(rf"worker id {worker_id} is in use by another running worker .* at tcp://.* --worker-id", error)


def test_a_file_that_is_not_what_its_name_says_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    code, output = failed_start(tmp_path, str(model))
    assert code == 2 and output.count("\n") == 1
    assert f"{model / 'model.safetensors'} is a pointer of Git LFS" in output


def test_weights_that_cannot_be_read_are_named_in_the_first_line_of_the_excerpt(model: Path, tmp_path: Path) -> None:
    # A file of the format, with none of the model's tensors.
    (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    code, output = failed_start(tmp_path, str(model))
    assert code == 1
    excerpt = [line for line in output.splitlines() if line.startswith("  | ")]
    assert re.search(r"ERROR .* worker cannot start: |ERROR .* worker ends because of an error", excerpt[0]), output
    assert "configuration: " not in output
    assert "before it was ready" in output and str(model) in output


def test_a_share_of_memory_that_is_too_small_says_by_how_much(tmp_path: Path) -> None:
    code, output = failed_start(tmp_path, "--gpu-memory-utilization=0.001")
    assert code == 1
    assert re.search(
        r"  \| .* is \d+ MiB too much and leaves nothing for a pool .* Raise memory_utilization", output
    ), output
