"""Flower strategies: recording, averaging, and central differential privacy."""
