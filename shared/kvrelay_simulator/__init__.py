"""A fleet on simulated devices: the real schedulers, caches, routing and decode admission on a clock of its own."""
