"""kvrelay compared with other servers: same model, same load, same client, one server at a time."""
