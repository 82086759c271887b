"""Closed-form attacks: they compute inputs of layers from gradients, instead of searching for examples with a given gradient."""
