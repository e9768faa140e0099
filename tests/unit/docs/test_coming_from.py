"""The tables for users of other servers name flags that exist here."""

from __future__ import annotations

import re

import pytest

from kvrelay.cli.launch_plan import up_parser
from kvrelay.config.without_effect import ADVICE
from kvrelay.telemetry.catalogue import METRICS
from kvrelay.telemetry.metrics import prometheus_name
from tests.document_blocks import ROOT
from tests.unit.docs.test_blocks import flags_in, known_flags

OF_OTHER_COMMANDS = {"--policy"}
"""Flags of their routers."""
PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
ROWS = [
    (row[0].strip(), row[1].strip())
    for row in re.findall(r"^\| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    if row[1].strip() not in ("kvrelay", "Here")
]


@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[theirs for theirs, _ in ROWS])
def test_a_flag_of_ours_exists(theirs: str, ours: str) -> None:
    known = set().union(*known_flags().values())
    assert flags_in(ours) - known == set()


@pytest.mark.parametrize("theirs", [theirs for theirs, ours in ROWS if ours.startswith("the same")])
def test_a_flag_with_the_same_name_has_it_at_kvrelay_up(theirs: str) -> None:
    taken = {name for action in up_parser()._actions for name in action.option_strings}
    assert flags_in(theirs) - taken == set()


def test_kvrelay_up_takes_a_flag_of_theirs_or_says_what_to_use() -> None:
    taken = {name for action in up_parser()._actions for name in action.option_strings}
    theirs = set().union(*(flags_in(flag) for flag, _ in ROWS if "ollama" not in flag))
    assert theirs - taken - ADVICE.keys() - OF_OTHER_COMMANDS == set()


def test_metrics_of_ours_exist() -> None:
    ours = set(re.findall(r"`((?:kvrelay|gen_ai)_\w+)`", PAGE))
    assert ours
    assert ours - {prometheus_name(metric) for metric in METRICS.values()} == set()
