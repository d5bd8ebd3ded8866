"""The pre-training objectives of ERNIE 3.0, each of which makes samples from pieces of documents or from triples."""
