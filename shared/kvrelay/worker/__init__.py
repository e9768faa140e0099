"""What prefill and decode services share: the step loop, and the shell of sockets, registry and signals around it."""
