"""The request bodies that the API takes, and their validation."""
