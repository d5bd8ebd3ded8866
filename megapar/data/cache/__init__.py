"""The cache: what was made from data or a tokenizer once, and is found again by its content."""
