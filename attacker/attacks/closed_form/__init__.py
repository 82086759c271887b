"""Closed-form attacks: they compute the examples from the gradient by solving equations, without an iterative search."""
