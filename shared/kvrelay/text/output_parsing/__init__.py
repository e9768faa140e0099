"""Parsers of what models write: reasoning, content and tool calls. Pure: no I/O, no tokens."""
