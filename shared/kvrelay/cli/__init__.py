"""The `kvrelay` commands."""
