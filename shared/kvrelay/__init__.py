"""LLM serving with prefill and decode taken apart: what the services share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrelay_embedded import LLM, Engine, SamplingParams

__all__ = ["LLM", "Engine", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """The embedded engine. Its imports, torch among them, take seconds, and most processes do without them."""
    if name in __all__:
        import kvrelay_embedded

        return getattr(kvrelay_embedded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
