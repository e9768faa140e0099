"""A request as an API gives it: its fields, their checks, and what is said of a wrong one."""
