"""megapar: hybrid-parallel pre-training of ERNIE and mixture-of-experts transformers."""

__version__ = "0.1.0"
