"""Adapters to Flower: records, and wrappers of the server's connection to its clients (`Grid`)."""
