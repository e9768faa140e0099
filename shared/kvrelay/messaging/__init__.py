"""The thin shell that carries links over ZMQ sockets."""
