"""What a built wheel holds, and that it works where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "kvrelay": ROOT / "shared",
    "kvrelay_simulator": ROOT / "shared",
    "kvrelay_bench": ROOT / "shared",
    "kvrelay_embedded": ROOT / "shared",
    "kvrelay_programs": ROOT / "shared",
    "kvrelay_router": ROOT / "services" / "router",
    "kvrelay_prefill": ROOT / "services" / "prefill",
    "kvrelay_decode": ROOT / "services" / "decode",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = out.glob("kvrelay-*.whl")
    return wheel


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_source_file_is_in_it(names: set[str]) -> None:
    sources = {
        path.relative_to(root).as_posix()
        for package, root in PACKAGES.items()
        for path in (root / package).rglob("*")
        if path.is_file() and path.suffix in {".py", ".typed", ".lua", ".c", ".cpp", ".html", ".jinja"}
    }
    assert {name.split("/")[0] for name in sources} == set(PACKAGES)
    assert any(name.endswith(".lua") for name in sources)
    assert sources - names == set()


def test_the_demo_model_and_its_licence_are_in_it(names: set[str]) -> None:
    demo = {name for name in names if name.startswith("kvrelay/_demo/")}
    assert {f"kvrelay/_demo/{file}" for file in ("config.json", "model.safetensors", "tokenizer.json")} <= demo
    assert any("LICENSE" in name for name in demo)


def test_licence_and_notice_are_in_it_and_nothing_that_is_not_ours_to_ship(names: set[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    assert not any("__pycache__" in name for name in names)


def test_it_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Everything that is read beside the code is found: scripts of Redis, the demo model."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """if True:
        import kvrelay.config.common, kvrelay.fleet, kvrelay_router, kvrelay_prefill, kvrelay_decode
        from kvrelay.cli.launch_plan import make_plan
        kvrelay.fleet.Registry("redis://127.0.0.1:1")
        print(kvrelay.config.common.__file__)
        print(make_plan({}, {}).router.model)
    """
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True, capture_output=True, text=True
    )
    module, model = done.stdout.split()
    assert Path(module).is_relative_to(tmp_path)
    assert Path(model) == tmp_path / "kvrelay" / "_demo"
