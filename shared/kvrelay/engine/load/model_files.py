"""The files of a model, and its identity: two workers may exchange KV only if their fingerprints agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from kvrelay.backends.backend import KVLayout
from kvrelay.model_directory import cached_snapshot

_WHOLE_BYTES = 64 * 2**20  # files up to this size are hashed whole
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 64 * 2**10
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_BLOCK_ORDER = "layer, 2, kv_head, token, dim "
_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.jinja",
)


def fingerprint(model_dir: Path, layout: KVLayout, salt: str = "") -> str:
    """Returns 32 hex digits over config, weights, tokenizer, dtype, and layout and type of KV.

    Large weight files are sampled: their sizes, the first bytes (safetensors keep names, shapes and types there) and
    evenly spaced runs. A difference in only a few weights may go unnoticed; another training step does not. `salt`
    separates weights that do not come from these files.
    """
    digest = hashlib.blake2b(digest_size=16)
    stored = "" if layout.stored is None else f"stored as {layout.stored} "
    digest.update(f"{layout.dtype} {stored}{_BLOCK_ORDER}{layout.block_shape}{salt}".encode())
    _add_whole(digest, _matching(model_dir, ("config.json", *_TOKENIZER)))
    weights = _matching(model_dir, _WEIGHTS)
    if sum(path.stat().st_size for path in weights) <= _WHOLE_BYTES:
        _add_whole(digest, weights)
    else:
        for path in weights:
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            for sample in _samples(path):
                digest.update(sample)
    return digest.hexdigest()


def shard_fingerprint(identity: str, size: int, pipeline_size: int = 1) -> str:
    """The fingerprint of workers that divide a model's heads among `size` ranks, and its layers among `pipeline_size`.
    `identity` is that of the undivided model."""
    if size == pipeline_size == 1:
        return identity
    layers = f" pipeline_parallel_size {pipeline_size}" if pipeline_size > 1 else ""
    return hashlib.blake2b(f"{identity} tensor_parallel_size {size}{layers}".encode(), digest_size=16).hexdigest()


def find_model_dir(name: str) -> Path:
    """The directory of a loaded model: `name` itself, or the hub name's snapshot in the local cache."""
    if Path(name).is_dir():
        return Path(name)
    snapshot = cached_snapshot(name)
    assert snapshot is not None
    return snapshot


def weight_files(name: str) -> list[str]:
    """The paths of the checkpoint's files, which are downloaded if `name` is a hub name. Raises OSError if there are
    none in safetensors: quantized weights and parts of tensors are read from no other kind of file."""
    whole = cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if whole is not None:
        return [whole]
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise OSError(
            f"{name} has no {SAFE_WEIGHTS_NAME}, the only kind of files of which quantized weights and parts of "
            f"tensors (for models divided among ranks) are read"
        )
    files: list[str] = get_checkpoint_shard_files(name, index)[0]
    return files


def _matching(directory: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def _add_whole(digest: hashlib.blake2b, paths: Sequence[Path]) -> None:
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            while part := file.read(2**20):
                digest.update(part)


def _samples(path: Path) -> Iterator[bytes]:
    """Evenly spaced runs of the file, beginning at its start."""
    last = max(0, path.stat().st_size - _SAMPLE_BYTES)
    with path.open("rb") as file:
        for index in range(_NUM_SAMPLES):
            file.seek(last * index // (_NUM_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
