"""The waiting queue: its orders, the samples of a request, prefixes in progress, prefill delay."""
