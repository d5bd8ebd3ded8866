"""Self-attention: its kinds as descriptions without torch, and the layers, which are named by them."""
