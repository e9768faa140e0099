"""Block bookkeeping: pool, block tables, prefix cache and block hashes. Pure: no I/O, no clock, no tensors."""
