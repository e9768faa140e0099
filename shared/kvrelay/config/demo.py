"""Location of the demo model, the default model."""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL_NAME = "kvrelay-demo"

_PACKAGED = Path(__file__).resolve().parents[1] / "_demo"
_CHECKOUT = Path(__file__).resolve().parents[3] / "models" / "demo"


def demo_model_path() -> Path | None:
    """The demo model's directory, in the wheel or the checkout; None if neither exists."""
    for path in (_PACKAGED, _CHECKOUT):
        if (path / "config.json").is_file():
            return path
    return None
