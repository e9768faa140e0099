"""Finds the files of a model before any service starts: in a directory, in this machine's Hugging Face cache, or by one
download from the hub. The services get a directory and ask no hub."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

from kvrelay.config.loader import ConfigError

HUB_TIMEOUT_S = 5.0
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_OTHER_FORMATS = (".gguf", ".bin", ".pth", ".pt")


def find_model(model: str, environ: Mapping[str, str], *, needs_weights: bool) -> str:
    """The directory of a model, complete for serving. A name of the hub is looked up in the cache, without network, and
    downloaded if it is not there. Raises ConfigError."""
    directory = Path(model)
    if directory.is_dir():
        _check_directory(f"--model {directory}", directory, needs_weights=needs_weights)
        return model
    cached = _cached(model, environ)
    if cached is None or not _is_complete(cached, needs_weights=needs_weights):
        _ask_hub(model, environ)
        cached = _download(model, environ, needs_weights=needs_weights)
        _check_directory(f"--model {model} ({cached})", cached, needs_weights=needs_weights)
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


def _check_directory(name: str, directory: Path, *, needs_weights: bool) -> None:
    """Raises ConfigError unless the directory has a config and, if needed, weights in a format that is read."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{name}: the directory has no config.json")
    if not needs_weights:
        return
    index = directory / _INDEX
    if (directory / "model.safetensors").is_file():
        return
    if index.is_file():
        missing = [shard for shard in _shards(index) if not (directory / shard).is_file()]
        if missing:
            raise ConfigError(
                f"{name}: {len(missing)} of the weight files of {_INDEX} are missing, the first is {missing[0]}; "
                f"complete the download"
            )
        return
    if any(directory.glob("pytorch_model*.bin")):  # transformers reads these
        return
    others = sorted(path.name for path in directory.iterdir() if path.suffix in _OTHER_FORMATS)
    found = f"; {others[0]} is of a format that is not read" if others else ""
    raise ConfigError(
        f"{name}: the directory has no model.safetensors and no {_INDEX}{found}; "
        f"--load-format dummy serves random weights"
    )


def _shards(index: Path) -> list[str]:
    """The weight files of an index. Raises ConfigError."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"--model: {index} is not an index of weight files: {error}") from None


# -- the cache --------------------------------------------------------------------------------------------------------


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where models of the hub are kept, by the variables of huggingface_hub."""
    if own := environ.get("HF_HUB_CACHE"):
        return Path(own).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def _cached(model: str, environ: Mapping[str, str]) -> Path | None:
    """The snapshot of a model in the cache. Raises ConfigError if it is no name of the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache_directory(environ))
    except HFValidationError:
        raise ConfigError(
            f"--model {model}: there is no such directory, and a name on the Hugging Face hub is OWNER/NAME"
        ) from None
    return Path(found).parent if isinstance(found, str) else None


def _is_complete(directory: Path, *, needs_weights: bool) -> bool:
    try:
        _check_directory("", directory, needs_weights=needs_weights)
    except ConfigError:
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
