"""Quantisation of updates to 32-bit words whose sum over clients does not overflow, and the weighted mean from that sum."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.recording.masked_vectors import HEADER_WORDS
from fedsim.secagg.protocol.masks import Words

MAX_SUM = 2**31 - 1
"""Largest magnitude of the sum of all clients' words: 32 bits with a sign."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class RevealedSum:
    """What the sum over all clients reveals.

    mean:            mean of the clipped and rounded updates, weighted by numbers of examples: dict from name to float64 array.
    num_examples:    total over all clients.
    clipped:         number of clipped coordinates over all clients.
    clipped_clients: number of clients with clipped coordinates.
    """

    mean: dict[str, NDArray[np.floating]]
    num_examples: int
    clipped: int
    clipped_clients: int


@dataclass(frozen=True, kw_only=True)
class Quantiser:
    """A map from updates to whole numbers that can be summed over clients.

    A coordinate is clipped to [-clip, clip], scaled to [-target_range, target_range], multiplied by the client's weight (its
    number of examples, at least 1), and rounded. Rounding changes a coordinate of the weighted mean by at most half of
    `clip / target_range`.

    clients: largest number of clients in a sum. max_weight: largest weight of a client.
    Raises ValueError if clients * max_weight * target_range exceeds `MAX_SUM`, so that a sum could overflow.
    """

    clip: float
    target_range: int
    clients: int
    max_weight: int

    def __post_init__(self) -> None:
        largest = self.clients * self.max_weight * self.target_range
        if largest > MAX_SUM:
            raise ValueError(
                f"{self.clients} clients x a weight of up to {self.max_weight} x scaled values of up to {self.target_range} add "
                f"up to {largest}, and 32-bit words hold {MAX_SUM}; lower secure_aggregation.bits or "
                "secure_aggregation.max_weight"
            )

    def encode(self, update: Mapping[str, NDArray[np.floating]], shapes: Shapes, weight: int) -> Words:
        """Return an update as a uint32 array (HEADER_WORDS + number of coordinates,).

        The header words are the weight, the number of clipped coordinates (at most MAX_SUM // clients), and 1 if any was clipped,
        else 0. Then come the coordinates, with the tensors in alphabetical order of their names.

        shapes: shapes of the weights by name; a tensor that is missing in `update` counts as zero. weight: the client's number of
        examples. Raises ValueError if `weight` is not from 1 to `max_weight`, if a tensor of `update` has a name or a shape that
        differs from `shapes`, and for values that are not finite.
        """
        if not 1 <= weight <= self.max_weight:
            # the message omits the number, because it is sent to the server, which must not learn it
            raise ValueError(
                f"this client has no examples, or more than secure_aggregation.max_weight = {self.max_weight}; give it examples, "
                "or raise max_weight (its number of examples is kept from the server)"
            )
        if unknown := sorted(update.keys() - shapes.keys()):
            raise ValueError(f"the update has tensor {unknown[0]!r}, and no such weight was sent")
        if misfits := sorted(name for name, values in update.items() if shapes[name] != values.shape):
            name = misfits[0]
            raise ValueError(
                f"the update's tensor {name!r} has shape {update[name].shape}, and the weight that was sent has {shapes[name]}"
            )
        words = np.zeros(self.count_words(shapes), np.uint32)
        clipped = 0
        for name, place in _find_slices(shapes).items():
            if name in update:
                scaled, beyond = self._scale(name, update[name], weight)
                words[place] = scaled.view(np.uint32)
                clipped += beyond
        words[:HEADER_WORDS] = weight, min(clipped, MAX_SUM // self.clients), clipped > 0
        return words

    def _scale(self, name: str, values: NDArray[np.floating], weight: int) -> tuple[NDArray[np.int32], int]:
        flat = values.reshape(-1)
        if not np.isfinite(flat).all():
            raise ValueError(
                f"{int((~np.isfinite(flat)).sum())} values of the update's tensor {name!r} are NaN or "
                "infinite; lower the learning rate"
            )
        beyond = int(np.count_nonzero(np.abs(flat) > self.clip))
        within = np.clip(flat.astype(np.float64), -self.clip, self.clip)
        return np.rint(within * (weight * self.target_range / self.clip)).astype(np.int32), beyond

    def decode(self, total: Words, shapes: Shapes, clients: int) -> RevealedSum:
        """Return what the sum of the encoded updates of `clients` clients reveals, such as their weighted mean.

        total: sum of the encoded updates, uint32. shapes: shapes of the weights by name.
        Raises ValueError if the total weight or the number of clients with clipped coordinates is impossible for this number of
        clients.
        """
        num_examples, clipped, clipped_clients = map(int, total[:HEADER_WORDS])
        if not clients <= num_examples <= clients * self.max_weight or clipped_clients > clients:
            raise ValueError(
                f"the sum over {clients} clients states {num_examples} examples and {clipped_clients} clients with clipped "
                "values, which is impossible, so a client sent a wrong vector or share; training continues without this round"
            )
        step = self.clip / self.target_range / num_examples
        mean = {name: total[place].view(np.int32).reshape(shapes[name]) * step for name, place in _find_slices(shapes).items()}
        return RevealedSum(mean, num_examples, clipped, clipped_clients)

    def count_words(self, shapes: Shapes) -> int:
        """Return the number of 32-bit words of an encoded update with these shapes, `HEADER_WORDS` included."""
        return HEADER_WORDS + sum(int(np.prod(shape)) for shape in shapes.values())


def _find_slices(shapes: Shapes) -> dict[str, slice]:
    places, start = {}, HEADER_WORDS
    for name in sorted(shapes):
        size = int(np.prod(shapes[name]))
        places[name] = slice(start, start + size)
        start += size
    return places
