"""The HTTP API, version 1: one router a module."""
