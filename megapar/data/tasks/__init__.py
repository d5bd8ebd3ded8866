"""The objectives of ERNIE 3.0: each makes samples from pieces of documents, or from triples."""
