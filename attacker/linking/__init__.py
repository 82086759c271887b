"""Linking: which batches, rounds and examples belong together. Tensors in, claims out; knows nothing of attacks."""

from attacker.linking.described import Described
from attacker.linking.features import HeadFeatures, head_features
from attacker.linking.link import link
from attacker.linking.links import Links, unlinked

__all__ = ["Described", "HeadFeatures", "Links", "head_features", "link", "unlinked"]
