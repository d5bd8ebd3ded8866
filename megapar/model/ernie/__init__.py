"""ERNIE encoder, pre-trained on masked words and sentence order."""
