"""The HTTP API, version 1: a module for each group of routes, and modules that these share."""
