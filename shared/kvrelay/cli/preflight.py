"""Checks what the services of `kvrelay up` need before any of them starts. Each failure is one message, which names the
field, the numbers and what to do."""

from __future__ import annotations

import errno
import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path

from kvrelay.cli.launch_plan import LaunchPlan
from kvrelay.config.loader import ConfigError
from kvrelay.config.router import RouterConfig
from kvrelay.config.worker import WorkerConfig
from kvrelay.machine_memory import available_memory_bytes
from kvrelay.ports import HeldPort
from kvrelay.transfer.nixl_agent import PACKAGES

HUB_TIMEOUT_S = 5.0
DEFAULT_POOL_BYTES = 1 << 30
SWAP_PART = 4
_INDEX = "model.safetensors.index.json"


def check_plan(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Raises ConfigError if the services of the plan could not start."""
    computing = [worker for worker in plan.workers if worker.backend != "simulated"]
    needs_weights = any(worker.load_format != "dummy" for worker in computing)
    for fleet in plan.router.fleets():
        check_model(fleet.model, environ, needs_weights=needs_weights and fleet.model == plan.router.model)
    check_memory([worker for worker in computing if is_on_cpu(worker, plan)], available_memory_bytes())
    check_transfer(plan.workers)
    check_page_ports(plan.router, plan.workers, plan.up.metrics_port)


# -- the model --------------------------------------------------------------------------------------------------------


def check_model(model: str, environ: Mapping[str, str], *, needs_weights: bool) -> None:
    """Raises ConfigError if the model is neither a directory with weights nor a repository that can be read."""
    directory = Path(model)
    if directory.is_dir():
        _check_directory(directory, needs_weights=needs_weights)
    elif not _is_cached(model):
        _ask_hub(model, environ)


def _check_directory(directory: Path, *, needs_weights: bool) -> None:
    if not (directory / "config.json").is_file():
        raise ConfigError(f"--model {directory}: the directory has no config.json")
    if not needs_weights:
        return
    index = directory / _INDEX
    if (directory / "model.safetensors").is_file():
        return
    if index.is_file():
        missing = [name for name in _shards(index) if not (directory / name).is_file()]
        if missing:
            raise ConfigError(
                f"--model {directory}: {len(missing)} of the weight files of {_INDEX} are missing, the first is "
                f"{missing[0]}; complete the download"
            )
        return
    if any(directory.glob("pytorch_model*.bin")):  # transformers reads these
        return
    others = sorted(path.name for path in directory.iterdir() if path.suffix in (".gguf", ".bin", ".pth", ".pt"))
    found = f"; {others[0]} is of a format that is not read" if others else ""
    raise ConfigError(
        f"--model {directory}: the directory has no model.safetensors and no {_INDEX}{found}; "
        f"--load-format dummy serves random weights"
    )


def longest_sequence(model: str) -> int | None:
    """The positions that the config of a model directory states; None if it states none, or for a hub name."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        reach = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return reach if isinstance(reach, int) else None


def _shards(index: Path) -> list[str]:
    """The weight files of an index. Raises ConfigError."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"--model: {index} is not an index of weight files: {error}") from None


def _is_cached(model: str) -> bool:
    """Returns whether the hub's cache on this machine has the model's config."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        raise ConfigError(
            f"--model {model}: there is no such directory, and a name on the Hugging Face hub is OWNER/NAME"
        ) from None


def _ask_hub(model: str, environ: Mapping[str, str]) -> None:
    """Asks the hub once for the model's config: the services would each try for about 30 seconds."""
    missing = f"--model {model}: there is no such directory, the Hugging Face cache of this machine does not have it"
    if environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise ConfigError(f"{missing}, and HF_HUB_OFFLINE forbids a download; name a directory, or unset it")
    endpoint = environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/{model}/resolve/main/config.json")
    if token := environ.get("HF_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            raise ConfigError(
                f"{missing}, and {endpoint} answers {error.code}: the name is wrong or the model needs a token; check "
                f"the name, or set HF_TOKEN"
            ) from None
        raise ConfigError(f"{missing}, and {endpoint} answers {error.code}; try again, or name a directory") from None
    except (OSError, HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)
        raise ConfigError(
            f"{missing}, and {endpoint} does not answer ({cause}); name a directory, or set HF_ENDPOINT to a mirror"
        ) from None


# -- memory -----------------------------------------------------------------------------------------------------------


def is_on_cpu(worker: WorkerConfig, plan: LaunchPlan) -> bool:
    return worker.worker_id not in plan.placed and not worker.device.startswith("cuda")


def check_memory(workers: Sequence[WorkerConfig], available: int) -> None:
    """Raises ConfigError if the sizes that were set for pools and swap spaces exceed the memory that is free.

    Default sizes are not checked: a pool takes no page in advance that would leave little free, and small models never
    fill theirs.
    """
    if not any(worker.kv_memory_bytes or worker.swap_space for worker in workers):
        return
    pools = swaps = 0
    for worker in workers:
        if worker.num_blocks is not None or worker.pool_sizing is not None:
            continue  # sized by the model, which is not known yet
        pool = int(worker.kv_memory_bytes or DEFAULT_POOL_BYTES)
        swap = worker.swap_bytes
        pools += pool * worker.num_processes
        swaps += (pool // SWAP_PART if swap is None else swap) * worker.num_processes
    if pools + swaps > available:
        raise ConfigError(
            f"--kv-memory-bytes and --swap-space: the pools of {len(workers)} workers take {_size(pools)} and their "
            f"swap spaces {_size(swaps)}, together {_size(pools + swaps)}, and {_size(available)} are free; lower "
            f"--kv-memory-bytes or --swap-space, or start fewer workers"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes >> 20} MiB"


# -- transports and ports ---------------------------------------------------------------------------------------------


def check_transfer(workers: Sequence[WorkerConfig]) -> None:
    """Raises ConfigError if NIXL is asked for by name and not installed."""
    wanted = any(worker.transfer_choice == "nixl" for worker in workers)
    if wanted and not any(find_spec(name) for name in PACKAGES):
        raise ConfigError(
            "--transfer nixl: NIXL is not installed; install the extra `nixl` (in a checkout: scripts/install-nixl), "
            "or use --transfer auto, which takes zmq without it"
        )


def check_page_ports(router: RouterConfig, workers: Sequence[WorkerConfig], first: int | None) -> None:
    """Raises ConfigError if a port of the services' pages is in use. `first`: `metrics_port` of `kvrelay up`."""
    wanted: list[tuple[str, int, str]] = []
    if router.metrics_port:
        numbers = range(router.metrics_port, router.metrics_port + router.processes)
        wanted += [(router.metrics_host, port, "the router") for port in numbers]
    if first is None:
        wanted += [(worker.http_host, worker.http_port, worker.worker_id) for worker in workers if worker.http_port]
    else:
        port = first + router.processes
        for worker in workers:
            if len(worker.each_worker()) == 1:
                wanted.append((worker.http_host, port, worker.worker_id))
            port += worker.data_parallel_size
    field = "metrics_port" if first is not None else "http_port or metrics_port"
    taken = [port for port, number in Counter(port for _, port, _ in wanted).items() if number > 1]
    if taken:
        raise ConfigError(f"{field}: port {taken[0]} is given to two services; leave room between them")
    for host, port, name in wanted:
        try:
            HeldPort(host, port).release()
        except OSError as error:
            what = f"{field}: /metrics of {name} cannot listen"
            raise ConfigError(f"{what} {listen_error(host, port, error, 'another')}") from None


def hold_port(host: str, port: int) -> HeldPort:
    """Reserves the router's port before it listens. Raises ConfigError if it cannot be bound."""
    try:
        return HeldPort(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen {listen_error(host, port, error, 'another with --port')}") from None


def listen_error(host: str, port: int, error: OSError, other: str) -> str:
    """The end of a message: the address, the cause and what to do. `other` names another port."""
    text = f"on {host} port {port}: {error.strerror or error}"
    if error.errno == errno.EADDRINUSE:
        return f"{text}; stop what listens there, or name {other}"
    if error.errno == errno.EACCES:
        return f"{text}; ports below 1024 need privileges: name {other}"
    return (
        f"{text}; {host} is not an address of this machine: use --host 127.0.0.1 (this machine alone) or "
        f"--host 0.0.0.0 (all its addresses)"
    )
