"""Local training of a client: steps, batches and privacy accounting."""
