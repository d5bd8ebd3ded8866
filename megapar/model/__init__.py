"""Transformers: ERNIE encoder and MoE decoder, their parameter tables and published (Hugging Face) forms."""
