"""The decoder: dense, or with mixture-of-experts layers."""
