"""Parsers of what models write. Pure: no I/O, no tokens."""
