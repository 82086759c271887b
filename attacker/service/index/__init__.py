"""The recordings below one root: found by watching, read lazily, and never trusted."""

from attacker.service.index.catalogue import Arrived, Catalogue, Changes, Run, Unknown

__all__ = ["Arrived", "Catalogue", "Changes", "Run", "Unknown"]
