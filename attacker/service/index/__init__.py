"""The index of the recordings below one root folder. Files are read when they are needed, and never trusted."""

from attacker.service.index.catalogue import Arrived, Catalogue, CatalogueRun, Changes, UnknownName

__all__ = ["Arrived", "Catalogue", "CatalogueRun", "Changes", "UnknownName"]
