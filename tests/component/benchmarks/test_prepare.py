"""What a machine without a package index is brought: what it lacks, and whole."""

from __future__ import annotations

import random
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

from benchmarks.gpu import prepare


def test_what_is_there_is_read_as_pip_says_it(tmp_path: Path) -> None:
    path = tmp_path / "there.txt"
    path.write_text(
        "torch==2.11.0\nHTTPX\n# a comment\ntyping_extensions==4.0\n-e git+https://x\nmine @ file:///here\nruamel.yaml==1\n\n"
    )
    assert prepare.read_have(path) == {
        "torch": "2.11.0",
        "httpx": "",
        "typing-extensions": "4.0",
        "mine": "",
        "ruamel-yaml": "1",
    }
    assert prepare.read_have(None) == {}


def test_everything_but_flashinfer_is_asked_for_with_its_bounds() -> None:
    wanted = {prepare.name_of(each): each for each in prepare.requirements()}
    assert {"torch", "transformers", "pyzmq", "uvloop"} <= set(wanted)
    assert "flashinfer-python" not in wanted
    assert wanted["transformers"].startswith("transformers>=")
    assert not any(";" in each for each in wanted.values())


@pytest.mark.parametrize("size", [0, 1, 3 << 20])
def test_pieces_become_the_same_files_again(tmp_path: Path, size: int) -> None:
    wheels, pieces, joined = (tmp_path / name for name in ("wheels", "pieces", "joined"))
    wheels.mkdir()
    (wheels / "a.whl").write_bytes(random.Random(size).randbytes(size))
    (wheels / "b.whl").write_bytes(b"b")
    prepare.main(["split", str(wheels), str(pieces), "--mib", "1"])
    assert all(piece.stat().st_size <= 1 << 20 for piece in pieces.iterdir())
    prepare.main(["join", str(pieces), str(joined)])
    assert {p.name: p.read_bytes() for p in joined.iterdir()} == {p.name: p.read_bytes() for p in wheels.iterdir()}


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_missing_piece_is_named_by_what_there_is(tmp_path: Path, lost: int) -> None:
    wheels, pieces = tmp_path / "wheels", tmp_path / "pieces"
    wheels.mkdir()
    (wheels / "a.whl").write_bytes(random.Random(1).randbytes(3 << 20))
    prepare.main(["split", str(wheels), str(pieces), "--mib", "1"])
    (pieces / prepare.piece_name(lost, 4)).unlink()
    with pytest.raises(SystemExit, match="some are missing"):
        prepare.main(["join", str(pieces), str(tmp_path / "joined")])


def test_a_checkout_is_known_by_its_version(tmp_path: Path) -> None:
    prepare.write_metadata(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("kvrelay", version("kvrelay"))


def test_of_several_names_one_that_can_be_imported_is_enough() -> None:
    assert prepare.find(["no_such_module", "json"])[0]
    found, said = prepare.find(["no_such_module"])
    assert not found
    assert "no_such_module: ModuleNotFoundError" in said
