"""The public names of the NIXL transport. `TransportUnavailable` is raised if NIXL or UCX does not work here."""

from kvrelay.transfer.nixl_agent import TransportUnavailable
from kvrelay.transfer.nixl_receiver import NixlReceiver
from kvrelay.transfer.nixl_sender import NixlSender, NixlSettings

__all__ = ["NixlReceiver", "NixlSender", "NixlSettings", "TransportUnavailable"]
