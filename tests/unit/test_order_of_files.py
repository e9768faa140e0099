"""The order in which a run in several processes begins the files of tests."""

from __future__ import annotations

from tests.each_test_once import TESTS, places

FOLDERS = ("component/a", "e2e", "e2e/demo_stack", "unit/b")
FILES = [TESTS / folder / f"test_{number}.py" for folder in FOLDERS for number in range(20)]


def test_folders_run_side_by_side_and_only_short_files_at_the_end() -> None:
    found = places(FILES)
    assert list(found) == FILES
    ordered = sorted(FILES, key=found.__getitem__)
    assert all(file.parent.name == "demo_stack" for file in ordered[:20])
    assert {file.relative_to(TESTS).parts[0] for file in ordered[20:30]} == {"component", "e2e", "unit"}
    assert all(file.parent.name == "b" for file in ordered[-2:])
    for folder in FOLDERS:
        of_folder = [file for file in ordered if file.parent == TESTS / folder]
        assert of_folder == [file for file in FILES if file.parent == TESTS / folder], "as they were collected"
