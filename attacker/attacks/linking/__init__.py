"""Linking: which batches, rounds and examples belong together. Tensors in, claims out; knows nothing of attacks."""

from attacker.attacks.linking.described import Described
from attacker.attacks.linking.features import HeadFeatures, head_features
from attacker.attacks.linking.link import link
from attacker.attacks.linking.links import Links, unlinked

__all__ = ["Described", "HeadFeatures", "Links", "head_features", "link", "unlinked"]
