"""The index of the recordings below one root folder. Files are read on demand, and their contents are not trusted."""

from attacker.service.index.catalogue import Arrived, Catalogue, CatalogueRun, Changes, UnknownName

__all__ = ["Arrived", "Catalogue", "CatalogueRun", "Changes", "UnknownName"]
