"""How many blocks fit beside the weights and the largest step."""
