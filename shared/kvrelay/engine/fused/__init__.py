"""Fused decoder layers: a checkpoint's own weights, run by C kernels and merged matrix products instead of modules."""
