"""What the documentation says of the code: generated parts, links, flags of other servers, runbook, tour."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import get_args

import pytest

from kvrelay.cli.launch_plan import up_parser
from kvrelay.config import RouterConfig, WorkerConfig, reference
from kvrelay.config.ranks import RankConfig
from kvrelay.config.up_config import UpConfig
from kvrelay.config.without_effect import ADVICE
from kvrelay.protocol.messages import AnyBody
from kvrelay.telemetry.catalogue import METRICS
from kvrelay.telemetry.metrics import prometheus_name
from kvrelay.worker.reports import TOTALS, TOTALS_WITHOUT_METRIC
from scripts import docs
from tests.document_blocks import ROOT
from tests.unit.docs.test_blocks import flags_in, known_flags

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def test_the_committed_files_are_what_the_code_says() -> None:
    assert docs.outdated() == [], "run .venv/bin/python scripts/docs.py"


def test_every_field_that_can_be_set_is_described() -> None:
    text = reference.render()
    configs = (RouterConfig, WorkerConfig, UpConfig, RankConfig)
    names = {name for config in configs for name in config.model_fields} - {"role"}
    assert set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) == names
    assert "`--kv-memory-bytes`" in text
    assert "`KVRELAY_API_KEYS`" in text
    assert "--api-keys`" not in text  # a key never comes as a flag


def test_every_total_of_a_worker_is_explained() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    totals = page[page.index("### Totals") : page.index("### Histograms")]
    assert {total for total in TOTALS.keys() | TOTALS_WITHOUT_METRIC if f"`{total}`" not in totals} == set()


def test_every_message_stands_in_the_protocols_table() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    table = page[page.index("| From, to | Message | Meaning |") : page.index("### The link")]
    assert {kind.__name__ for kind in get_args(AnyBody) if f"`{kind.__name__}`" not in table} == set()


class Light(StrEnum):
    RED = "red"
    GREEN = "green"


def test_a_diagram_shows_the_labelled_transitions_and_the_ends() -> None:
    diagram = docs.state_diagram(Light, {(Light.RED, Light.GREEN): "go"})
    assert "[*] --> RED" in diagram
    assert "RED --> GREEN: go" in diagram
    assert "GREEN --> [*]" in diagram
    assert "RED --> [*]" not in diagram


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_files_lead_to_what_is_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
        link = target[0] or target[1]
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        found = page if not path else (page.parent / path).resolve()
        assert found.exists(), f"{page.name}: {link}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{page.name}: {link}"


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -- the tables for users of other servers name flags that exist here ------------------------------------------------


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


# -- the runbook has a step for every alert --------------------------------------------------------------------------


RULES = (ROOT / "deploy" / "observability" / "alerts.yml").read_text(encoding="utf-8")
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")


def test_every_alert_has_a_section_and_no_other_is_named() -> None:
    alerts = set(re.findall(r"alert: (\w+)", RULES))
    named = re.findall(r"^((?:`Kvrelay\w+`(?:, )?)+)$", RUNBOOK, re.MULTILINE)
    assert {name for line in named for name in re.findall(r"\w+", line)} == alerts


# -- the tour names ten files in reading order that exist, with their sizes ------------------------------------------


TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
STOPS = [
    (path, int(lines))
    for path, lines in re.findall(r"^\| *\d+ \| \[[^\]]+\]\(\.\./([^)]+)\) \| (\d+) \|$", TOUR, re.MULTILINE)
]
SIZES = {
    path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path, _ in STOPS if (ROOT / path).exists()
}


def test_the_ten_files_exist_and_have_a_section_each_in_this_order() -> None:
    paths = [path for path, _ in STOPS]
    assert len(set(paths)) == 10
    assert set(paths) - SIZES.keys() == set()
    assert re.findall(r"^## \d+\. [^\n]+\n\n\[[^\]]+\]\(\.\./([^)]+)\)", TOUR, re.MULTILINE) == paths


def test_the_stated_sizes_are_right_within_a_tenth() -> None:
    assert {path: lines for path, lines in STOPS if abs(lines - SIZES[path]) > SIZES[path] / 10} == {}


def test_the_files_have_at_most_3000_lines_together() -> None:
    (stated,) = re.findall(r"^Together (\d+) lines\.$", TOUR, re.MULTILINE)
    assert sum(SIZES.values()) <= 3000
    assert abs(int(stated) - sum(SIZES.values())) <= sum(SIZES.values()) / 10


def test_the_files_on_the_way_exist() -> None:
    listed = re.findall(r"`([a-z_/]+)`", TOUR.partition("## Every file on the way")[2].partition("\n## ")[0])
    stems = {path.stem for path in ROOT.glob("s*/**/*.py")}
    assert len(listed) > 100
    assert {name for name in listed if name.rpartition("/")[2] not in stems} == set()


def test_the_readme_names_the_tour() -> None:
    assert "(docs/tour.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
