"""Programs of several calls through the whole system: workloads, switches, frontends. See `__main__.py`."""
