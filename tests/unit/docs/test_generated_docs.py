"""What the documentation takes from the code is up to date, and its links lead somewhere."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import get_args

import pytest

from kvrelay.config import RouterConfig, WorkerConfig, reference
from kvrelay.config.ranks import RankConfig
from kvrelay.config.up_config import UpConfig
from kvrelay.protocol.messages import AnyBody
from kvrelay.worker.reports import TOTALS, TOTALS_WITHOUT_METRIC
from scripts import docs

ROOT = Path(__file__).parents[3]
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
