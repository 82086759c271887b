"""Transformations of training examples before training: mixtures of images, with soft labels."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional

from defenses.registry import Choice, Registry


class PublicPool(Protocol):
    """Public examples with values in [0, 1]. Indexing with (M,) indices gives (M, *shape); a tensor satisfies the protocol."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor, /) -> Tensor: ...


class BatchTransform(NamedTuple):
    """A transformation of a batch before training.

    mix:    maps x (N, *shape) in [0, 1], soft labels y (N, K), a generator, and public examples or None to the x and y to train
            on, with the same shapes and ranges. Leaves x and y as they are, and draws from the generator.
    min_batch_size: smallest batch size that an experiment may have with this transformation.
    public: name of the data set of public examples that are mixed in; "" for none.
    """

    mix: Callable[[Tensor, Tensor, Generator, PublicPool | None], tuple[Tensor, Tensor]]
    min_batch_size: int = 1
    public: str = ""


MAX_SHARE = 0.65
"""Largest coefficient of one image in a mixture of InstaHide, c1 in the paper."""
MAX_IMAGES = 1000
"""Largest number of images in a mixture of InstaHide. The paper uses 4 and 6."""
MIN_PRIVATE = 0.3
"""Smallest sum of the coefficients of private images in a mixture with public ones, c2 in the paper."""


def mixup(alpha: float = 0.4) -> BatchTransform:
    """Mix each example of a batch with a random one of the batch, and their labels in the same way.

    Returns this transformation, a `BatchTransform`.
    alpha: the mixing coefficient is drawn from Beta(alpha, alpha) once per batch; positive and finite. The partners are a random
           permutation of the batch, in which an example can be its own partner.
    Source: Zhang et al. 2018, "mixup: beyond empirical risk minimization".
    """
    if not 0 < alpha < math.inf:
        raise ValueError(f"mixup: alpha must be positive and finite, got {alpha}")

    def mix(x: Tensor, y: Tensor, rng: Generator, pool: PublicPool | None) -> tuple[Tensor, Tensor]:
        share = float(_make_numpy_generator(rng).beta(alpha, alpha))
        partner = torch.randperm(len(x), generator=rng, device=rng.device).to(x.device)
        return share * x + (1 - share) * x[partner], share * y + (1 - share) * y[partner]

    return BatchTransform(mix, min_batch_size=2)


def instahide(k: int = 4, public: str = "", flips: float = 0.5) -> BatchTransform:
    """Mix k images with random coefficients, and invert random values of the result.

    Returns this transformation, a `BatchTransform`.
    k:      number of images in a mixture, with the image itself: 1 to 1000, and at least 3 with public images.
    public: name of a data set. k - 2 images of a mixture come from it and two from the batch; only the labels of these two are
            mixed, so that label weights sum to less than 1, as published. Without public images, all k come from the batch. The
            images from the batch are the image itself and the images at its place in random permutations of the batch, so that an
            image may occur twice in a mixture.
    flips:  probability that a value (a channel of a pixel) is inverted, in [0, 0.5]; 0.5 as published, with which training is
            hard.

    Coefficients of k >= 2 images are uniform on the simplex with none above 0.65; with public images, the coefficients of the two
    images from the batch sum to at least 0.3. The paper flips the sign of values around 0; for values in [0, 1], x becomes 1 - x.
    Evaluation uses unchanged images.

    Source: Huang et al. 2020, "InstaHide: instance-hiding schemes for private distributed learning".
    """
    if type(k) is not int or not (3 if public else 1) <= k <= MAX_IMAGES:
        minimum = "3 with public images" if public else "1"
        raise ValueError(f"instahide: k must be a whole number from {minimum} to {MAX_IMAGES}, got {k!r}")
    if not 0 <= flips <= 0.5:
        raise ValueError(f"instahide: flips must be in [0, 0.5], got {flips}")
    private = 2 if public else k

    def mix(x: Tensor, y: Tensor, rng: Generator, pool: PublicPool | None) -> tuple[Tensor, Tensor]:
        if (pool is None) == bool(public):
            expected, given = ("the public images", "None") if public else ("None", "public images")
            raise ValueError(f"instahide: the argument pool must be {expected} with public={public!r}, got {given}")
        shares = _draw_shares(len(x), k, private, _make_numpy_generator(rng)).to(x)
        count, at = len(x), rng.device
        orders = [torch.arange(count)] + [torch.randperm(count, generator=rng, device=at) for _ in range(private - 1)]
        images = [x[order.to(x.device)] for order in orders]
        if pool is not None:
            drawn = torch.randint(len(pool), (k - private, count), generator=rng, device=at).cpu()
            images += [pool[rows].to(x) for rows in drawn]
        mixed = sum(_to_columns(share, x) * image for share, image in zip(shares.T, images, strict=True))
        labels = sum(share[:, None] * y[order.to(y.device)] for share, order in zip(shares.T, orders, strict=False))
        mirrored = (torch.rand(x.shape, generator=rng, device=at) < flips).to(x.device)
        return torch.where(mirrored, 1 - mixed, mixed), labels

    return BatchTransform(mix, min_batch_size=2 if k > 1 and not public else 1, public=public)


INPUTS: Registry[Callable[..., BatchTransform]] = Registry(
    "defenses.inputs", {"mixup": mixup, "instahide": instahide}, setting="inputs"
)


@dataclass(frozen=True)
class InputsSpec(Choice):
    """Specification of a transformation of the training examples, such as `mixup(alpha=0.4)`; empty for none."""

    registry: ClassVar[Registry[Callable[..., BatchTransform]]] = INPUTS
    what: ClassVar[str] = "inputs"

    def build(self) -> BatchTransform | None:
        """Return the transformation, or None if there is none."""
        return None if self.step is None else self.make()


def to_one_hot(y: Tensor, num_classes: int) -> Tensor:
    """Return labels (N,) as one-hot vectors (N, K) in float32."""
    return functional.one_hot(y, num_classes).float()


def _draw_shares(count: int, k: int, private: int, rng: np.random.Generator) -> Tensor:
    """Draw the coefficients of InstaHide, (count, k) in float64, whose rows sum to 1, by rejection.

    For k > 1, no coefficient is above `MAX_SHARE`. The first `private` columns are for private images; if `private` is less than
    k, these columns sum to at least `MIN_PRIVATE` in each row.
    """
    rows = np.empty((count, k))
    missing = np.arange(count)
    while len(missing):
        rows[missing] = rng.dirichlet(np.ones(k), size=len(missing))
        drawn = rows[missing]
        refused = (k > 1) & (drawn.max(axis=1) > MAX_SHARE)
        refused |= (private < k) & (drawn[:, :private].sum(axis=1) < MIN_PRIVATE)
        missing = missing[refused]
    return torch.from_numpy(rows)


def _to_columns(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _make_numpy_generator(rng: Generator) -> Any:
    """Return a NumPy generator with a seed drawn from `rng`, for distributions that torch cannot draw from a given generator."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=rng, device=rng.device)))
