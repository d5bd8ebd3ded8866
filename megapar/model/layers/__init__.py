"""Layers that the models share, split over tensor, sequence and context parallel ranks."""
