"""Tokenizers: SentencePiece and Hugging Face, and the one that a run keeps."""
