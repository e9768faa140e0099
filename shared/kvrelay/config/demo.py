"""Where the model lies that is served when no other is named."""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL_NAME = "kvrelay-demo"

_PACKAGED = Path(__file__).resolve().parents[1] / "_demo"
_CHECKOUT = Path(__file__).resolve().parents[3] / "models" / "demo"


def demo_model_path() -> Path | None:
    """The demo model's directory: packaged with the wheel, or in the checkout. None where neither is there."""
    for path in (_PACKAGED, _CHECKOUT):
        if (path / "config.json").is_file():
            return path
    return None
