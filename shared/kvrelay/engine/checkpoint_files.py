"""Finds the safetensors files of a checkpoint."""

from __future__ import annotations

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files


def weight_files(name: str) -> list[str]:
    """The paths of the checkpoint's files, which are downloaded if `name` is a hub name.

    Raises:
        OSError: there are none. Quantized weights and parts of tensors are read from no other kind of file.
    """
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
