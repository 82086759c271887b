"""Linking: detection of slots in different rounds that hold the same example. It works on tensors, independent of attacks.

In this package, a place is the slot of an example in one round.
"""

from attacker.attacks.linking.described import Described
from attacker.attacks.linking.features import HeadFeatures, solve_head_features
from attacker.attacks.linking.link import link
from attacker.attacks.linking.links import Links, build_unlinked

__all__ = ["Described", "HeadFeatures", "Links", "build_unlinked", "link", "solve_head_features"]
