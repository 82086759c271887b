"""Defenses: what a client does to its update before it leaves, and what an attacker who knows that does about it."""

from defenses.base import Defense, State, Update, chain, global_norm, identity, stateless
from defenses.channel import Channel
from defenses.clipping import clip
from defenses.noise import gaussian
from defenses.spec import DEFENSES, DefenseSpec

__all__ = [
    "DEFENSES",
    "Channel",
    "Defense",
    "DefenseSpec",
    "State",
    "Update",
    "chain",
    "clip",
    "gaussian",
    "global_norm",
    "identity",
    "stateless",
]
