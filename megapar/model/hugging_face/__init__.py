"""Hugging Face folders: how published architectures name and store the tensors of the parameter table."""
