"""Channels: the attacker's model of each defense, under the same name and with the same arguments."""

from defenses.channels.clipping import clip, clip_each
from defenses.channels.noise import gaussian, laplace
from defenses.channels.quantisation import qsgd, sign, uniform
from defenses.channels.selection import masked, withhold
from defenses.channels.sparsification import dgc, gradient_dropout, prune, random_k, top_k
from defenses.channels.units import in_gradient_units

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
