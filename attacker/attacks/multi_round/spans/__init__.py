"""Attacks that recover examples from the row spaces of first-layer updates over many rounds.

In this package, F is the length of a vector [x, 1]: the number of inputs of the layer plus 1.
"""
