"""Simulated devices: a runner and a transfer without tensors, timed by profiles."""
