"""An engine of several ranks: step inputs to the ranks, results back, and the processes' life."""
