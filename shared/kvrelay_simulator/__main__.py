"""`python -m kvrelay_simulator`: see `kvrelay simulate`."""

from __future__ import annotations

from kvrelay_simulator.simulate_command import main

if __name__ == "__main__":
    raise SystemExit(main())
