"""The HTTP API, version 1, with one module per router."""
