"""The runbook has a step for every alert."""

from __future__ import annotations

import re

from tests.document_blocks import ROOT

RULES = (ROOT / "deploy" / "observability" / "alerts.yml").read_text(encoding="utf-8")
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")


def test_every_alert_has_a_section_and_no_other_is_named() -> None:
    alerts = set(re.findall(r"alert: (\w+)", RULES))
    named = re.findall(r"^((?:`Kvrelay\w+`(?:, )?)+)$", RUNBOOK, re.MULTILINE)
    assert {name for line in named for name in re.findall(r"\w+", line)} == alerts
