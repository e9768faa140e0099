"""The router's view of its workers: who is there, in which state, and under which load."""
