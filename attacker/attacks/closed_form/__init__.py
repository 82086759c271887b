"""Closed-form attacks: inputs computed layer by layer from the gradient, without a search."""
