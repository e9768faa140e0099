"""What kvrelay does with a GPU, held against what the GPU itself can do; see `python -m benchmarks.gpu --help`."""
