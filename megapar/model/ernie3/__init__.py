"""ERNIE 3.0: universal layers, and a branch of layers for each of two kinds of tasks."""
