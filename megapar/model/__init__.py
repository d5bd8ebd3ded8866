"""Transformers: ERNIE encoder and MoE decoder, their parameter tables and Hugging Face forms."""
