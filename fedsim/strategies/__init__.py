"""Flower strategies that record, average batch-norm statistics, or add central differential privacy (noise on the server)."""
