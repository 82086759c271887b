"""Closed forms for networks that begin with a linear layer: they compute its inputs, of one example or a batch, and labels."""
