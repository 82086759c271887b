"""The recordings below one root: found by watching, read lazily, and never trusted."""

from attacker.service.index.catalogue import Arrived, Catalogue, CatalogueRun, Changes, UnknownName

__all__ = ["Arrived", "Catalogue", "CatalogueRun", "Changes", "UnknownName"]
