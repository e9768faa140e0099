"""Metrics, traces, logs and event logs of all processes."""
