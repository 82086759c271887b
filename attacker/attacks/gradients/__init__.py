"""Gradients of many problems that share weights, batched."""
