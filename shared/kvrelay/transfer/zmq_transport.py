"""The ZMQ transport's door: both ends, and the sender's settings."""

from kvrelay.transfer.zmq_receiver import ZmqReceiver
from kvrelay.transfer.zmq_sender import SenderSettings, ZmqSender

__all__ = ["SenderSettings", "ZmqReceiver", "ZmqSender"]
