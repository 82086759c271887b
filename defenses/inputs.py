"""What a client may do to its examples before it trains on them: mixtures with soft labels."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional

from defenses._registry import Choice, Registry


class PublicPool(Protocol):
    """Public examples, in [0, 1]: by an index tensor (M,), a tensor (M, *shape). A tensor is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor, /) -> Tensor: ...


class Mixing(NamedTuple):
    """A change of a batch before training.

    mix:    from x (N, *shape) in [0, 1], soft labels y (N, K), randomness and public examples where there are any, the x and y
            to train on, of the same shapes and ranges. Changes none of its arguments.
    least:  the smallest batch of which anything is mixed; a smaller one trains as it is, or nearly so.
    public: names the data set that public examples come from; "" for none.
    """

    mix: Callable[[Tensor, Tensor, Generator, PublicPool | None], tuple[Tensor, Tensor]]
    least: int = 1
    public: str = ""


MAX_SHARE = 0.65
"""Largest coefficient in a mixture of InstaHide, c1 in the paper."""
MAX_IMAGES = 1000
"""In a mixture; published are 4 and 6."""
MIN_PRIVATE = 0.3
"""Smallest sum of the coefficients of private images beside public ones, c2 in the paper."""


def mixup(alpha: float = 0.4) -> Mixing:
    """Mix each example with another of its batch, and their labels likewise.

    alpha: the share is drawn from Beta(alpha, alpha), once a batch, and the partners are a permutation of the batch; positive.
    Source: Zhang et al. 2018, "mixup: beyond empirical risk minimization".
    """
    if not 0 < alpha < math.inf:
        raise ValueError(f"mixup: alpha must be positive and finite, got {alpha}")

    def mix(x: Tensor, y: Tensor, rng: Generator, pool: PublicPool | None) -> tuple[Tensor, Tensor]:
        share = float(_numpy(rng).beta(alpha, alpha))
        partner = torch.randperm(len(x), generator=rng, device=rng.device).to(x.device)
        return share * x + (1 - share) * x[partner], share * y + (1 - share) * y[partner]

    return Mixing(mix, least=2)


def instahide(k: int = 4, public: str = "", flips: float = 0.5) -> Mixing:
    """Mix k images by random shares, and mirror pixels at mid-grey at random.

    k:      images in a mixture; 1 to 1000, with public ones at least 3.
    public: a data set for k - 2 of them, beside two private ones, whose labels alone are mixed: their shares add up to less
            than 1, as published. Without one, all k come from the batch, by permutations of it that may meet an image twice.

    flips:  probability of each pixel to be mirrored, in [0, 0.5]; 0.5 as published, which is hard to learn from.

    Shares are uniform on the simplex, none above 0.65; with public images, those of private ones add up to at least 0.3.
    The paper flips signs of values around 0; in [0, 1], x becomes 1 - x. Nothing is flipped or mixed in evaluation.

    Source: Huang et al. 2020, "InstaHide: instance-hiding schemes for private distributed learning".
    """
    if type(k) is not int or not (3 if public else 1) <= k <= MAX_IMAGES:
        least = "3 with public images" if public else "1"
        raise ValueError(f"instahide: k must be a whole number from {least} to {MAX_IMAGES}, got {k!r}")
    if not 0 <= flips <= 0.5:
        raise ValueError(f"instahide: flips must be in [0, 0.5], got {flips}")
    private = 2 if public else k

    def mix(x: Tensor, y: Tensor, rng: Generator, pool: PublicPool | None) -> tuple[Tensor, Tensor]:
        if (pool is None) == bool(public):
            raise ValueError(f"instahide: public images are {'missing' if public else 'given, and none are asked for'}")
        shares = _shares(len(x), k, private, _numpy(rng)).to(x)
        orders = [torch.arange(len(x))] + [torch.randperm(len(x), generator=rng) for _ in range(private - 1)]
        images = [x[order] for order in orders]
        if pool is not None:
            images += [pool[torch.randint(len(pool), (len(x),), generator=rng)].to(x) for _ in range(k - private)]
        mixed = sum(_columns(share, x) * image for share, image in zip(shares.T, images, strict=True))
        labels = sum(share[:, None] * y[order] for share, order in zip(shares.T, orders, strict=False))
        mirrored = (torch.rand(x.shape, generator=rng) < flips).to(x.device)
        return torch.where(mirrored, 1 - mixed, mixed), labels

    return Mixing(mix, least=2 if k > 1 and not public else 1, public=public)


INPUTS: Registry[Callable[..., Mixing]] = Registry("defenses.inputs", {"mixup": mixup, "instahide": instahide})


@dataclass(frozen=True)
class InputsSpec(Choice):
    """A change of the examples before training; nothing leaves them as they are."""

    registry: ClassVar[Registry[Callable[..., Mixing]]] = INPUTS
    what: ClassVar[str] = "inputs"

    def build(self) -> Mixing | None:
        """The change itself, for the client; None for none."""
        return None if self.step is None else self.made()


def soft(y: Tensor, num_classes: int) -> Tensor:
    """(N, K) float32: labels (N,) as certain probabilities."""
    return functional.one_hot(y, num_classes).float()


def _shares(count: int, k: int, private: int, rng: np.random.Generator) -> Tensor:
    """(count, k) float64, rows of sum 1 within the bounds; the first `private` columns are those of private images."""
    rows = np.empty((count, k))
    missing = np.arange(count)
    while len(missing):
        rows[missing] = rng.dirichlet(np.ones(k), size=len(missing))
        drawn = rows[missing]
        refused = (k > 1) & (drawn.max(axis=1) > MAX_SHARE)
        refused |= (private < k) & (drawn[:, :private].sum(axis=1) < MIN_PRIVATE)
        missing = missing[refused]
    return torch.from_numpy(rows)


def _columns(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _numpy(rng: Generator) -> Any:
    """What torch cannot draw from a generator, seeded from it."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device)))
