"""Attacks that recover examples from the row spaces of first-layer updates over many rounds."""
