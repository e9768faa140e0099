"""The parts of the benchmark, each a module with `ABOUT`, what its figures mean, and `run`."""
