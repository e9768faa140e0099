"""Default sampling parameters from the model's `generation_config.json`.

OpenAI's defaults (temperature 1, everything else off) fill in the values that the file lacks. `do_sample: false` makes
greedy decoding the default.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values for parameters that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 10.0),
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Reads the file's content. A value that a request could not have is ignored, with a warning."""
    values: dict[str, Any] = {}
    for name, (low, high) in _RANGES.items():
        value = generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            logger.warning("generation_config.json: %s = %r is not usable and left out", name, value)
            continue
        values[name] = int(value) if name == "top_k" else float(value)
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    return SamplingDefaults(**values)
