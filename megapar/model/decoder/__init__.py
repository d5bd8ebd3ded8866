"""Decoder language model, dense or with mixture-of-experts layers."""
