"""A model divided over processes: heads, MLPs, experts and vocabulary (tensor parallelism), or layers (pipeline)."""
