"""Closed forms for networks that begin with a linear layer: the inputs of one example or of a whole batch, with labels."""
