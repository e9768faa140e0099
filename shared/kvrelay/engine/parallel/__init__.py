"""Tensor parallelism: a model whose heads, MLPs, experts and vocabulary are divided over processes."""
