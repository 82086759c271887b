"""The parametrisation of a search: what is optimised, and how examples and labels are made of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attacker.attacks.matching.decoders import DecoderFactory, pixels
from attacker.attacks.matching.initialisation import Init, normal
from fedsim.recording.observation import DataSpec


@dataclass(frozen=True, kw_only=True)
class Parametrisation:
    """How examples are made of what a search optimises.

    decoder: the map from latents to examples, see `decoders`. init: the first examples, which are encoded into latents.
    boxed:   project latents into the decoder's box after every step.
    """

    decoder: DecoderFactory = pixels
    init: Init = normal
    boxed: bool = False


class LatentSpace:
    """The latent vector of one problem: its examples' latents, then soft labels, then how far surrogate weights are.

    examples: behind a case. joint: whether soft labels are searched for. surrogate: whether surrogate weights are.
    """

    def __init__(
        self, parametrisation: Parametrisation, data: DataSpec, examples: int, *, joint: bool = False, surrogate: bool = False
    ) -> None:
        self.data, self.examples, self.joint, self.surrogate = data, examples, joint, surrogate
        self.init, self.boxed = parametrisation.init, parametrisation.boxed
        self.decoder = parametrisation.decoder(data)
        self.size = examples * torch.Size(self.decoder.shape).numel()

    def decode(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (V, *shape), and y: the given labels (V,), or soft ones (V, K) of the latent; of many problems, rows."""
        x = self.decoder.decode(z[..., : self.size].reshape(-1, *self.decoder.shape))
        x = x.reshape(*z.shape[:-1], self.examples, *self.data.shape)
        if not self.joint:
            return x, labels
        classes = self.data.num_classes
        soft = z[..., self.size : self.size + self.examples * classes]
        return x, soft.reshape(*z.shape[:-1], self.examples, classes).softmax(dim=-1)

    def encode(self, starts: Sequence[Tensor], rngs: Sequence[Generator], device: str) -> Tensor:
        """Return latents (P, D) for the examples (V, *shape) that each of P searches begins with; soft labels are drawn."""
        parts = [self.decoder.encode(torch.cat(list(starts)).to(device)).reshape(len(starts), -1)]
        if self.joint:
            shape = (self.examples * self.data.num_classes,)
            parts.append(torch.stack([torch.randn(shape, generator=g) for g in rngs]).to(device))
        if self.surrogate:
            parts.append(torch.zeros(len(starts), 1, device=device))
        return torch.cat(parts, dim=1)

    def project(self, z: Tensor) -> Tensor:
        """Return latents (P, D) within the decoder's box, where the search has one."""
        if not self.boxed:
            return z
        latents = self.decoder.project(z[:, : self.size].reshape(-1, *self.decoder.shape))
        return torch.cat([latents.reshape(len(z), -1), z[:, self.size :]], dim=1)
