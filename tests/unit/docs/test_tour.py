"""The tour names ten files in reading order that exist, with their sizes, and that can be read in one sitting."""

from __future__ import annotations

import re

from tests.document_blocks import ROOT

PAGE = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
ROWS = [
    (path, int(lines))
    for path, lines in re.findall(r"^\| *\d+ \| \[[^\]]+\]\(\.\./([^)]+)\) \| (\d+) \|$", PAGE, re.MULTILINE)
]
SIZES = {
    path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path, _ in ROWS if (ROOT / path).exists()
}


def test_the_ten_files_exist_and_have_a_section_each_in_this_order() -> None:
    paths = [path for path, _ in ROWS]
    assert len(set(paths)) == 10
    assert set(paths) - SIZES.keys() == set()
    assert re.findall(r"^## \d+\. [^\n]+\n\n\[[^\]]+\]\(\.\./([^)]+)\)", PAGE, re.MULTILINE) == paths


def test_the_stated_sizes_are_right_within_a_tenth() -> None:
    assert {path: lines for path, lines in ROWS if abs(lines - SIZES[path]) > SIZES[path] / 10} == {}


def test_the_files_have_at_most_3000_lines_together() -> None:
    (stated,) = re.findall(r"^Together (\d+) lines\.$", PAGE, re.MULTILINE)
    assert sum(SIZES.values()) <= 3000
    assert abs(int(stated) - sum(SIZES.values())) <= sum(SIZES.values()) / 10


def test_the_readme_names_the_tour() -> None:
    assert "(docs/tour.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
