"""The NIXL transport's door: both ends, the sender's settings, and what is raised where NIXL does not work."""

from kvrelay.transfer.nixl_agent import TransportUnavailable
from kvrelay.transfer.nixl_receiver import NixlReceiver
from kvrelay.transfer.nixl_sender import NixlSender, NixlSettings

__all__ = ["NixlReceiver", "NixlSender", "NixlSettings", "TransportUnavailable"]
