"""Messages between router, prefill and decode, their codec, and the reliable link under them."""
