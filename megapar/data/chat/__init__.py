"""Conversations for fine-tuning: records, chat templates, the spans that are learned, and their tokens."""
