"""Attacks on the row spaces of first-layer updates over many rounds."""
