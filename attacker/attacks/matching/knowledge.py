"""What is known of the examples behind a case before a search for them begins."""

from dataclasses import replace

import torch
from torch import Tensor

from attacker.attacks.base import Case
from attacker.attacks.linking import Links, unlinked


def links_of(case: Case, epochs: int) -> Links:
    """What is known of the examples behind a case: nothing is shared where nobody says so.

    epochs: local ones that have examples of their own, one set after the other.
    """
    links = case.links
    if links is None:
        links = unlinked([observation.num_examples or 0 for observation in case.observations])
    places = tuple(torch.cat([own + epoch * links.examples for epoch in range(epochs)]) for own in links.places)
    labels = None if links.labels is None else links.labels.repeat(epochs)
    return replace(links, places=places, confidence=links.confidence.repeat(epochs), labels=labels)


def logits_of(case: Case, links: Links, epochs: int) -> Tensor:
    """(V, K), what an oracle tells of the examples of a case; zeros of those that the first observation does not have."""
    told = case.known_logits
    assert told is not None
    found = told.new_zeros(links.examples, *told.shape[1:])
    found[links.places[0]] = told.repeat(epochs, *(1,) * (told.ndim - 1))
    return found
