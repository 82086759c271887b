"""Channels (the attacker's models) of the built-in defenses of updates, under the same names.

A channel takes the arguments of its defense, with a channel in the place of an inner defense.
"""

from defenses.channels.clip_and_noise import clip, clip_each, gaussian, laplace
from defenses.channels.quantisation import qsgd, sign, uniform
from defenses.channels.selection import in_gradient_units, masked, withhold
from defenses.channels.sparsification import dgc, gradient_dropout, prune, random_k, top_k

__all__ = [
    "clip",
    "clip_each",
    "dgc",
    "gaussian",
    "gradient_dropout",
    "in_gradient_units",
    "laplace",
    "masked",
    "prune",
    "qsgd",
    "random_k",
    "sign",
    "top_k",
    "uniform",
    "withhold",
]
