"""Batched gradients of many independent problems that share the network's weights, and layer-wise tools to compute them."""
