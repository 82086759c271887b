"""Linking: finds the places of different rounds that hold the same example. It works on tensors and knows no attacks."""

from attacker.attacks.linking.described import Described
from attacker.attacks.linking.features import HeadFeatures, head_features
from attacker.attacks.linking.link import link
from attacker.attacks.linking.links import Links, unlinked

__all__ = ["Described", "HeadFeatures", "Links", "head_features", "link", "unlinked"]
