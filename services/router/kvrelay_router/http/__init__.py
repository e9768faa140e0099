"""HTTP/1.1 on client sockets: connections and their limits, clients that leave, bodies. Knows no endpoint."""
