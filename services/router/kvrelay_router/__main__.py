"""`python -m kvrelay_router`: one router."""

from __future__ import annotations

from kvrelay.config import RouterConfig, load_config
from kvrelay.config.loader import DESCRIPTIONS
from kvrelay.process import service_main
from kvrelay_router.server import run_router

PROG = "kvrelay router"


def main() -> int:
    """Runs a router until a stop signal. Returns the exit status."""
    return service_main(
        PROG,
        "router",
        lambda: load_config(RouterConfig, prog=PROG, description=DESCRIPTIONS["router"]),
        run_router,
        lambda config: {"router_id": config.router_id},
    )


if __name__ == "__main__":
    raise SystemExit(main())
