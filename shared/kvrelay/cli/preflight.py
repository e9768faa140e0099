"""Checks what the services of `kvrelay up` need before any of them starts. Each failure is one message, which names the
field, the numbers and what to do.

The files of a model are found in a directory, in this machine's Hugging Face cache, or by one download from the hub.
The services get a directory and ask no hub.
"""

from __future__ import annotations

import errno
import json
import sys
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
from kvrelay.handoff.transports.nixl_agent import PACKAGES
from kvrelay.machine_memory import available_memory_bytes
from kvrelay.model_directory import INDEX, cached_snapshot, weight_shards, wrong_file
from kvrelay.process import HeldPort
from kvrelay.ranks.local_ranks import why_not_divided
from kvrelay.scheduling.memory.swapping import SWAP_PART
from kvrelay.text.output_parsing.dialect import UnknownParser, own_parser_names

DEFAULT_POOL_BYTES = 1 << 30


def find_models(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Looks for the models of the plan once, and returns the flags that give all services the directory of a model that
    was named as on the hub. Raises ConfigError."""
    needs_weights = any(worker.load_format != "dummy" for worker in _computing(plan))
    own = plan.router.model
    found = {}
    for fleet in plan.router.fleets():
        found[fleet.model] = find_model(fleet.model, environ, needs_weights=needs_weights and fleet.model == own)
    if found[own] == own or any(worker.model != own for worker in plan.workers):
        return {}
    return {"model": found[own], "served_model_name": plan.router.served_model_name}


def check_plan(plan: LaunchPlan) -> None:
    """Raises ConfigError if the services of the plan could not start."""
    computing = _computing(plan)
    check_sizes(computing)
    check_memory([worker for worker in computing if is_on_cpu(worker, plan)], available_memory_bytes())
    check_transfer(plan.workers)
    check_page_ports(plan.router, plan.workers, plan.up.metrics_port)
    check_parsers(plan.router)


def check_sizes(workers: Sequence[WorkerConfig]) -> None:
    """Raises ConfigError if the heads or layers of a worker's model do not divide among its ranks."""
    for worker in workers:
        if why := why_not_divided(worker.model, worker.tensor_parallel_size, worker.pipeline_parallel_size):
            raise ConfigError(f"{worker.worker_id}: {Path(worker.model).name} with {why}")


def check_parsers(router: RouterConfig) -> None:
    """Raises ConfigError for names of parsers that are not known."""
    for fleet in router.fleets():
        try:
            own_parser_names(fleet.tool_parser, fleet.reasoning_parser)
        except UnknownParser as error:
            raise ConfigError(f"--tool-parser and --reasoning-parser: {error}") from None


def _computing(plan: LaunchPlan) -> list[WorkerConfig]:
    return [worker for worker in plan.workers if worker.backend != "simulated"]


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
            "--transfer nixl: NIXL is not installed; install the extra `nixl`, or use --transfer auto, which takes zmq "
            "without it"
        )


def check_page_ports(router: RouterConfig, workers: Sequence[WorkerConfig], first: int | None) -> None:
    """Raises ConfigError if a port of the services' pages is in use. `first`: `metrics_port` of `kvrelay up`."""
    wanted: list[tuple[str, int, str]] = []
    if router.pages_port:
        wanted.append((router.pages_host, router.pages_port, "the router"))
    if first is None:
        wanted += [(worker.host, worker.http_port, worker.worker_id) for worker in workers if worker.http_port]
    else:
        port = first + 1
        for worker in workers:
            if len(worker.each_worker()) == 1:
                wanted.append((worker.host, port, worker.worker_id))
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


HUB_TIMEOUT_S = 5.0
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_OTHER_FORMATS = (".gguf", ".bin", ".pth", ".pt")


def find_model(model: str, environ: Mapping[str, str], *, needs_weights: bool) -> str:
    """The directory of a model, complete for serving. A name of the hub is looked up in the cache, without network, and
    downloaded if it is not there. Raises ConfigError."""
    if Path(model).is_dir():
        _check_model(f"--model {Path(model)}", Path(model), needs_weights=needs_weights)
        return model
    cached = _cached(model, environ)
    if cached is None or not _is_complete(cached, needs_weights=needs_weights):
        _ask_hub(model, environ)
        cached = _download(model, environ, needs_weights=needs_weights)
    _check_model(f"--model {model} ({cached})", cached, needs_weights=needs_weights)
    return str(cached)


def longest_sequence(model: str) -> int | None:
    """The positions that the config of a model directory states; None if it states none, or for a hub name."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        reach = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return reach if isinstance(reach, int) else None


# -- a directory ------------------------------------------------------------------------------------------------------


def _check_model(name: str, directory: Path, *, needs_weights: bool) -> None:
    """Raises ConfigError for a file that is not what its name says, for an index without a map of weight files, and if
    the config or the weights are missing."""
    try:
        if fault := wrong_file(directory, needs_weights=needs_weights):
            raise ConfigError(f"{name}: {fault}")
        _check_presence(name, directory, needs_weights=needs_weights)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from None


def _check_presence(name: str, directory: Path, *, needs_weights: bool) -> None:
    """Raises ConfigError unless the directory has a config and, if needed, weights in a format that is read; ValueError
    or OSError for an index that is none."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{name}: the directory has no config.json")
    if not needs_weights:
        return
    index = directory / INDEX
    if (directory / "model.safetensors").is_file():
        return
    if index.is_file():
        if missing := [shard for shard in weight_shards(index) if not (directory / shard).is_file()]:
            raise ConfigError(
                f"{name}: {len(missing)} of the weight files of {INDEX} are missing, the first is {missing[0]}; "
                f"complete the download"
            )
        return
    if any(directory.glob("pytorch_model*.bin")):  # transformers reads these
        return
    others = sorted(path.name for path in directory.iterdir() if path.suffix in _OTHER_FORMATS)
    found = f"; {others[0]} is of a format that is not read" if others else ""
    raise ConfigError(
        f"{name}: the directory has no model.safetensors and no {INDEX}{found}; "
        f"--load-format dummy serves random weights"
    )


# -- the cache --------------------------------------------------------------------------------------------------------


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where models of the hub are kept, by the variables of huggingface_hub."""
    if own := environ.get("HF_HUB_CACHE"):
        return Path(own).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def _cached(model: str, environ: Mapping[str, str]) -> Path | None:
    """The snapshot of a model in the cache. Raises ConfigError if it is no name of the hub."""
    try:
        return cached_snapshot(model, cache_directory(environ))
    except ValueError:
        raise ConfigError(
            f"--model {model}: there is no such directory, and a name on the Hugging Face hub is OWNER/NAME"
        ) from None


def _is_complete(directory: Path, *, needs_weights: bool) -> bool:
    try:
        _check_presence("", directory, needs_weights=needs_weights)
    except (ConfigError, OSError, ValueError):
        return False
    return any(next(directory.glob(name), None) for name in _TOKENIZERS)


# -- the hub ----------------------------------------------------------------------------------------------------------


def _endpoint(environ: Mapping[str, str]) -> str:
    return environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _ask_hub(model: str, environ: Mapping[str, str]) -> None:
    """Asks the hub once for the model's config: huggingface_hub would try for about 30 seconds. Raises ConfigError."""
    missing = f"--model {model}: there is no such directory, the Hugging Face cache of this machine does not have it"
    if environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise ConfigError(f"{missing}, and HF_HUB_OFFLINE forbids a download; name a directory, or unset it")
    endpoint = _endpoint(environ)
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


def _download(model: str, environ: Mapping[str, str], *, needs_weights: bool) -> Path:
    """Downloads what serving needs, without what the cache has. Raises ConfigError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    cache = cache_directory(environ)
    print(f"Downloading {model} from {_endpoint(environ)} to {cache}", file=sys.stderr)
    api = HfApi(endpoint=_endpoint(environ), token=environ.get("HF_TOKEN"))
    try:
        patterns = list(_SMALL_FILES)
        if needs_weights:
            names = [file.rfilename for file in api.model_info(model).siblings or ()]
            has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in names)
            patterns.append("*.safetensors" if has_safetensors else "pytorch_model*.bin")
        ignored = ["*/*"]  # other formats and experiments are in directories
        return Path(api.snapshot_download(model, cache_dir=cache, allow_patterns=patterns, ignore_patterns=ignored))
    except (OSError, HfHubHTTPError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"--model {model}: the download failed ({reason}); try again, which continues it") from None
