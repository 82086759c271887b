"""Linking: detection of the same example in different rounds of a client, from tensors that describe the rounds.

In this package, a place is the position of one example in one observation (the update of one client in one round). A pass is one
epoch over the client's examples.
"""

from attacker.attacks.linking.features import HeadFeatures, solve_head_features
from attacker.attacks.linking.links import Links, build_unlinked, describe_gaps, link, repeat_links
from attacker.attacks.linking.pair_costs import RoundDescription

__all__ = [
    "HeadFeatures",
    "Links",
    "RoundDescription",
    "build_unlinked",
    "describe_gaps",
    "link",
    "repeat_links",
    "solve_head_features",
]
