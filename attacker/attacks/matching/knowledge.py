"""Prior knowledge about the examples of a case: links between observations, and logits from an oracle."""

from dataclasses import replace

import torch
from torch import Tensor

from attacker.attacks.base import Case
from attacker.attacks.linking import Links, unlinked


def links_of(case: Case, epochs: int) -> Links:
    """Return the links of a case; without given links, no two slots hold the same example.

    epochs: number of local epochs with separate examples. Each slot is repeated for every epoch.
    """
    links = case.links
    if links is None:
        links = unlinked([observation.num_examples or 0 for observation in case.observations])
    places = tuple(torch.cat([own + epoch * links.examples for epoch in range(epochs)]) for own in links.places)
    labels = None if links.labels is None else links.labels.repeat(epochs)
    return replace(links, places=places, confidence=links.confidence.repeat(epochs), labels=labels)


def logits_of(case: Case, links: Links, epochs: int) -> Tensor:
    """Return the oracle's logits (V, K) of the examples of a case; zeros for those that the first observation lacks."""
    told = case.known_logits
    assert told is not None
    found = told.new_zeros(links.examples, *told.shape[1:])
    found[links.places[0]] = told.repeat(epochs, *(1,) * (told.ndim - 1))
    return found
