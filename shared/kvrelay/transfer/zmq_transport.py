"""The public names of the ZMQ transport."""

from kvrelay.transfer.zmq_receiver import ZmqReceiver
from kvrelay.transfer.zmq_sender import MAX_RECEIVERS, SenderSettings, ZmqSender

__all__ = ["MAX_RECEIVERS", "SenderSettings", "ZmqReceiver", "ZmqSender"]
