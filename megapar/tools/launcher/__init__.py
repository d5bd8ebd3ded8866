"""``megapar launch``: rendezvous, ranks, their output, and their restarts."""
