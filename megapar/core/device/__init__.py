"""Devices and their operators.

Only this package calls a device's API; cost formulas and tools name kinds of devices.
"""
