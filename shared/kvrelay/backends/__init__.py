"""Attention over paged KV: one interface, and one implementation per kind of device."""
