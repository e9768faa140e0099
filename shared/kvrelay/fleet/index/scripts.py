"""The index's Lua scripts, run by digest and reloaded if a server does not know them (NOSCRIPT)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

NAMES = ("open", "apply", "close", "sweep", "slots", "snapshot")


class IndexScripts:
    """All scripts on one blocking or asynchronous client."""

    def __init__(self, client: Any, base: str) -> None:
        self.base = base
        package = resources.files("kvrelay.fleet.index")
        self._scripts = {
            name: client.register_script(package.joinpath(f"{name}.lua").read_text(encoding="utf-8")) for name in NAMES
        }

    def run(self, name: str, arguments: Sequence[Any] = ()) -> Any:
        """The script's answer, or an awaitable of it for an asynchronous client."""
        return self._scripts[name](keys=[self.base], args=arguments)
