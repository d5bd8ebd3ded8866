"""Wrong bits and products: digests, guards, what differs, and who was at fault."""
