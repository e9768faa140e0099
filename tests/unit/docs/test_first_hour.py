"""The page about the first hour names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.document_blocks import ROOT

PAGE = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!Point|---)(.*) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=[row.partition(" |")[0] for row in ROWS])
def test_a_row_names_tests_that_exist(row: str) -> None:
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", row.rpartition(" | ")[2])
    assert tests, f"no test: {row}"
    for file, name in tests:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^(?:async )?def {name}\(", text, re.MULTILINE), f"{file} has no {name}"
