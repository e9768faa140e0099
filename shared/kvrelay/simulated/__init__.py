"""Devices that only take their time: a runner and a transfer without tensors, and the profiles that say how long."""
