# `make serve` and `make test` do all the set-up themselves. `make serve ARGS="--prefill 2 --port 9000"` passes flags on.
ARGS ?=

.PHONY: serve install test test-faults check wheel clean

serve: install
	@exec .venv/bin/kvrelay up $(ARGS)

install:
	@scripts/install

test: install
	@scripts/test -m "not faults and not gpu" -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

test-faults: install
	@scripts/test -m "faults and not gpu" $(ARGS)

check: install
	@scripts/check

wheel: install
	@.venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .kvrelay dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
