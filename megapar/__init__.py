"""megapar: hybrid-parallel pre-training of ERNIE and mixture-of-experts transformers."""

__version__ = "0.2.0"
