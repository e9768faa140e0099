"""The index's scripts, run by their digest and loaded again where a server does not know them (NOSCRIPT)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

NAMES = ("open", "apply", "close", "sweep", "lookup", "slots", "snapshot")


class IndexScripts:
    """All scripts on one client, blocking or asynchronous: a call returns what the client's calls return."""

    def __init__(self, client: Any, base: str) -> None:
        self.base = base
        package = resources.files("kvrelay.fleet.index")
        self._scripts = {
            name: client.register_script(package.joinpath(f"{name}.lua").read_text(encoding="utf-8")) for name in NAMES
        }

    def run(self, name: str, arguments: Sequence[Any] = ()) -> Any:
        """The script's answer, or an awaitable of it."""
        return self._scripts[name](keys=[self.base], args=arguments)
