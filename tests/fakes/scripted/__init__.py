"""A model whose answers a script determines, in real processes, for tests of clients."""
