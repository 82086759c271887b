"""Linking: which batches, rounds and examples belong together. Tensors in, claims out; knows nothing of attacks."""

from attacker.linking.links import Links, unlinked

__all__ = ["Links", "unlinked"]
