"""Runs steps: a batch becomes one packed forward on a device, launched, landed or discarded."""
