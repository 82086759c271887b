"""Defenses of clients against the server, and the attacker's models of them (channels)."""

from defenses.base import Defense, State, Update, chain, global_norm, identity, stateless
from defenses.channel import Channel
from defenses.clipping import clip, clip_each
from defenses.combinators import add_feedback, in_gradient_units
from defenses.dgc import dgc
from defenses.noise import gaussian, laplace
from defenses.quantisation import qsgd, sign, uniform
from defenses.selection import masked, withhold
from defenses.sparsification import gradient_dropout, prune, random_k, top_k
from defenses.spec import DEFENSES, DefenseSpec, Kind

__all__ = [
    "DEFENSES",
    "Channel",
    "Defense",
    "DefenseSpec",
    "Kind",
    "State",
    "Update",
    "add_feedback",
    "chain",
    "clip",
    "clip_each",
    "dgc",
    "gaussian",
    "global_norm",
    "gradient_dropout",
    "identity",
    "in_gradient_units",
    "laplace",
    "masked",
    "prune",
    "qsgd",
    "random_k",
    "sign",
    "stateless",
    "top_k",
    "uniform",
    "withhold",
]
