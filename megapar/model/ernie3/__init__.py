"""ERNIE 3.0: universal layers, and a branch of layers for each kind of task."""
