"""How a sequence and its KV blocks move from a prefill to a decode worker: the state machines of both sides."""
