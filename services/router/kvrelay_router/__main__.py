"""`python -m kvrelay_router`: one router."""

from __future__ import annotations

import logging
import sys

from kvrelay.config import ConfigError, RouterConfig, load_config
from kvrelay.telemetry.logs import setup_logging
from kvrelay_router.server import StartFailed, run_router

log = logging.getLogger(__name__)


def main() -> int:
    """Runs a router until it is told to stop; returns the exit status."""
    try:
        config = load_config(RouterConfig, prog="kvrelay router", description="One router.")
    except ConfigError as error:
        sys.stderr.write(f"kvrelay router: {error}\n")
        return 2
    setup_logging(config.log_level, config.log_format, router_id=config.router_id)
    config.log_values(log)
    try:
        run_router(config)
    except StartFailed as error:
        log.error("the router cannot start: %s", error, exc_info=log.isEnabledFor(logging.DEBUG))
        return 1
    except Exception:
        log.exception("the router ends")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
