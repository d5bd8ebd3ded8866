"""Devices and their operators. No other package mentions cuda or npu."""
