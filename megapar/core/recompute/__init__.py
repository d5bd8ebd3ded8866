"""Activation checkpointing: units of layers keep their inputs only and run again in the backward."""
