"""deploy/systemd: units that systemd takes, of commands and settings that exist. A fault test runs their commands,
without systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvrelay.config.router import RouterConfig
from kvrelay.config.worker import WorkerConfig

UNITS = sorted((Path(__file__).parents[3] / "deploy" / "systemd").iterdir())
MOST_EXPOSED = 30
"""Tenths of the exposure that systemd computes, from 0 to 10."""


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_settings_are_fields_and_a_stop_may_drain(unit: Path) -> None:
    text = unit.read_text()
    role = re.search(r"^ExecStart=/opt/kvrelay/bin/kvrelay (router|prefill|decode)$", text, re.MULTILINE)
    assert role is not None and f"kvrelay-{role[1]}" in unit.name
    fields = (RouterConfig if role[1] == "router" else WorkerConfig).model_fields
    for name in re.findall(r"KVRELAY_(\w+)=", text):
        assert name == "CACHE_DIR" or name.lower() in fields, name
    (timeout_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(timeout_s) > fields["drain_timeout_s"].default
    assert "KillMode=mixed" in text, "a worker has its own ranks drain"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_them(tmp_path: Path) -> None:
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/kvrelay/bin/kvrelay", "/bin/true"))
    for unit in UNITS:
        name = unit.name.replace("@.", "@0.")
        verified = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True, check=False
        )
        assert (verified.returncode, verified.stderr) == (0, ""), verified.stderr
        path, limit = str(tmp_path / unit.name), f"--threshold={MOST_EXPOSED}"
        exposed = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", limit, path], capture_output=True, text=True, check=False
        )
        assert exposed.returncode == 0, exposed.stdout[-2000:] + exposed.stderr
