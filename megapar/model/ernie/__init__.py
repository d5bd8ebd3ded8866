"""The ERNIE encoder, pre-trained by masked words and sentence order."""
