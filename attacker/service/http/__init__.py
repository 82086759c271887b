"""The HTTP API, version 1: each module a router."""
