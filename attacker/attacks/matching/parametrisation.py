"""The parametrisation of a search: the latent vector that is optimised, and the examples and labels computed from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attacker.attacks.matching.decoders import DecoderFactory, build_decoder, check_shapes, get_decoder_name, pixels
from attacker.attacks.matching.initialisation import Init, normal
from fedsim.recording.observation import DataSpec


@dataclass(frozen=True, kw_only=True)
class Parametrisation:
    """The settings of a parametrisation.

    decoder: the map from latents to examples, see `decoders`. init: the first examples, which are encoded into latents.
    boxed:   whether to project latents into the decoder's box after every step.
    """

    decoder: DecoderFactory = pixels
    init: Init = normal
    boxed: bool = False


class LatentSpace:
    """The latent vector of a problem: the latents of all examples, then logits of soft labels, then a surrogate parameter.

    examples:  number V of examples per problem.
    joint:     whether soft labels are optimised together with the examples.
    surrogate: whether the weights at which the gradient is computed are optimised as well (SME), by one parameter.
    """

    def __init__(
        self, parametrisation: Parametrisation, data: DataSpec, examples: int, *, joint: bool = False, surrogate: bool = False
    ) -> None:
        self.data, self.examples, self.joint, self.surrogate = data, examples, joint, surrogate
        self.init, self.boxed = parametrisation.init, parametrisation.boxed
        self.decoder, self.decoder_name = build_decoder(parametrisation.decoder, data), get_decoder_name(parametrisation.decoder)
        self.size = examples * torch.Size(self.decoder.shape).numel()

    def decode(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return examples x (V, *shape), and the given labels (V,) or the soft labels (V, K) in the latent; batched if z is."""
        x = self.decoder.decode(z[..., : self.size].reshape(-1, *self.decoder.shape))
        x = x.reshape(*z.shape[:-1], self.examples, *self.data.shape)
        if not self.joint:
            return x, labels
        classes = self.data.num_classes
        soft = z[..., self.size : self.size + self.examples * classes]
        return x, soft.reshape(*z.shape[:-1], self.examples, classes).softmax(dim=-1)

    def encode(self, starts: Sequence[Tensor], rngs: Sequence[Generator], device: str) -> Tensor:
        """Return the latents (P, D) from which P searches start.

        starts: for each problem, the examples (V, *shape) to start from. rngs: for the logits of soft labels, where labels are
        optimised too.
        Raises ValueError if the decoder's functions do not keep to the shapes that it states.
        """
        x = torch.cat(list(starts)).to(device)
        check_shapes(self.decoder, self.decoder_name, x)
        parts = [self.decoder.encode(x).reshape(len(starts), -1)]
        if self.joint:
            shape = (self.examples * self.data.num_classes,)
            parts.append(torch.stack([torch.randn(shape, generator=g) for g in rngs]).to(device))
        if self.surrogate:
            parts.append(torch.zeros(len(starts), 1, device=device))
        return torch.cat(parts, dim=1)

    def project(self, z: Tensor) -> Tensor:
        """Return latents (P, D) projected into the decoder's box, if `boxed` is set."""
        if not self.boxed:
            return z
        latents = self.decoder.project(z[:, : self.size].reshape(-1, *self.decoder.shape))
        return torch.cat([latents.reshape(len(z), -1), z[:, self.size :]], dim=1)
