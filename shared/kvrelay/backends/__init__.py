"""Attention over paged KV: one interface, one implementation per kind of device."""
