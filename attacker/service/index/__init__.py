"""Catalogue of the recordings below one root folder, with the results of attacks on them, for the pages of the service.

Files are read on demand, and their contents are not trusted.
"""

from attacker.service.index.catalogue import ArrivedRound, Catalogue, CatalogueRun, Changes, UnknownName

__all__ = ["ArrivedRound", "Catalogue", "CatalogueRun", "Changes", "UnknownName"]
