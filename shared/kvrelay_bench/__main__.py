"""`python -m kvrelay_bench`: see `kvrelay bench`."""

from __future__ import annotations

from kvrelay_bench.bench_command import main

if __name__ == "__main__":
    raise SystemExit(main())
