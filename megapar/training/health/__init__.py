"""Guards, stops, failures, and the response of the next start."""
