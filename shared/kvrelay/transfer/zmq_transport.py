"""The public names of the ZMQ transport."""

from kvrelay.transfer.zmq_receiver import ZmqReceiver
from kvrelay.transfer.zmq_sender import SenderSettings, ZmqSender

__all__ = ["SenderSettings", "ZmqReceiver", "ZmqSender"]
