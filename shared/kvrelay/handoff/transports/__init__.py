"""Moving KV blocks from a prefill worker's pool into a decode worker's pool."""
