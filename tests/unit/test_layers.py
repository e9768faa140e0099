"""The layers that the linter of imports checks have a place for every part of the product."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ON_TOP = {"kvrelay.__init__", "kvrelay.__main__"}


def test_every_part_is_in_a_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(each["layers"] for each in settings["contracts"] if each["type"] == "layers")
    named = {part for layer in layers for part in re.split(r" [|:] ", layer)}
    shared = (ROOT / "shared" / "kvrelay").iterdir()
    parts = {f"kvrelay.{each.stem}" for each in shared if each.suffix == ".py" or (each / "__init__.py").exists()}
    assert named == parts - ON_TOP | {*settings["root_packages"]} - {"kvrelay"}
