"""Control messages between processes: the links of `kvrelay.protocol.link` over ZMQ sockets."""
