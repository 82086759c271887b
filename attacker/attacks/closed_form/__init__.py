"""Closed forms: what can be solved for, layer by layer, without a search."""
