# `make serve` and `make test` do all the set-up themselves. `make serve ARGS="--prefill 2 --port 9000"` passes flags on.
ARGS ?=

PARALLEL = -n auto --dist loadfile --no-loadscope-reorder

.PHONY: serve install test test-slow test-all test-faults test-soak check wheel clean

serve: install
	@exec .venv/bin/kvrelay up $(ARGS)

install:
	@scripts/install

test: install
	@scripts/test -m "not faults and not gpu and not slow" $(PARALLEL) $(ARGS)

# What `make test` leaves out for time, and all examples of the tests with random ones.
test-slow: install
	@scripts/test -m "(slow or hypothesis) and not faults and not gpu" --hypothesis-profile=thorough $(PARALLEL) $(ARGS)

test-all: test
	@$(MAKE) --no-print-directory test-slow

test-faults: install
	@scripts/test -m "faults and not gpu" $(ARGS)

# An hour of mixed load; make test-soak ARGS="--seconds 600" is shorter.
test-soak: install
	@.venv/bin/python -m tests.faults.soak $(ARGS)

check: install
	@scripts/check

wheel: install
	@.venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .kvrelay dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
