"""Closed-form attacks: they solve equations for the inputs of layers, instead of searching for examples with a given gradient."""
