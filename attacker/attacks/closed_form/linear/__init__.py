"""Inputs of a first linear layer, of one example or a batch."""
