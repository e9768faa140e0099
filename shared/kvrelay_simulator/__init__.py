"""A fleet of simulated devices in virtual time, with the real schedulers, caches, routing and admission."""
