"""The decode service: takes prompts over and continues them."""
