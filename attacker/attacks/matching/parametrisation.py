"""The variable that a search optimises, a latent vector, with maps from it to examples and labels, and from examples to it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attacker.attacks.matching.decoders import DecoderFactory, build_decoder, check_shapes, get_decoder_name, pixels
from attacker.attacks.matching.initialisation import Init, normal
from attacker.attacks.optimisers.first_order import Optimiser
from attacker.attacks.optimisers.phases import PhasedOptimiser
from fedsim.recording.observation import DataSpec


@dataclass(frozen=True, kw_only=True)
class Parametrisation:
    """Settings of the variable that a search optimises.

    decoder: function that returns the map from latents to examples for given data, see `decoders`.
    init:    function that returns the examples from which a search starts; the decoder encodes them into latents.
    boxed:   whether to project latents into the decoder's box after every step.
    """

    decoder: DecoderFactory = pixels
    init: Init = normal
    boxed: bool = False


class LatentSpace:
    """The layout of a latent vector: latents of all examples, then logits of labels if `joint`, then variables of random draws.

    The variables of a client's random draws are part of it if `drawn` is not None. One more number is at the end if `surrogate`;
    `Simulation` does not allow both.
    Values that a decoder shares (`Decoder.shared`) are at the beginning, once for all examples.

    examples:  number V of examples per problem (one search for the examples of one case).
    joint:     whether soft labels are optimised together with the examples.
    surrogate: whether the weights at which the gradient is computed are optimised as well (SME), by the last number.
    drawn: start of the variables of a client's random draws (`simulation.draws`), (variables,); None without such variables.
    """

    def __init__(
        self, parametrisation: Parametrisation, data: DataSpec, examples: int, *, joint: bool = False, surrogate: bool = False
    ) -> None:
        self.data, self.examples, self.joint, self.surrogate = data, examples, joint, surrogate
        self.drawn: Tensor | None = None
        self.init, self.boxed = parametrisation.init, parametrisation.boxed
        self.decoder, self.decoder_name = build_decoder(parametrisation.decoder, data), get_decoder_name(parametrisation.decoder)
        each = torch.Size(self.decoder.shape).numel()
        self.size = self.decoder.shared + examples * (each - self.decoder.shared)

    def decode(self, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples x (V, *shape) of a latent vector z (D,), and their labels; both have a leading axis if z has one.

        The labels are `labels` itself, or, if `joint`, soft labels (V, K) computed from z.
        """
        if self.joint:
            classes = self.data.num_classes
            soft = z[..., self.size : self.size + self.examples * classes]
            labels = soft.reshape(*z.shape[:-1], self.examples, classes).softmax(dim=-1)
        flat_labels = labels.flatten(0, z.ndim - 1)
        x = self.decoder.apply(self._unpack(z).reshape(-1, *self.decoder.shape), flat_labels)
        return x.reshape(*z.shape[:-1], self.examples, *self.data.shape), labels

    def _unpack(self, z: Tensor) -> Tensor:
        """Return the latents of examples (..., V, values of one) in latent vectors z (..., D), each with the shared values."""
        shared, latents = z[..., : self.decoder.shared], z[..., self.decoder.shared : self.size]
        latents = latents.reshape(*z.shape[:-1], self.examples, -1)
        return torch.cat([shared[..., None, :].expand(*latents.shape[:-1], -1), latents], dim=-1)

    def _pack(self, latents: Tensor) -> Tensor:
        """Return latents of examples (P, V, values) as rows (P, size); shared values are those of the first example."""
        return torch.cat([latents[:, 0, : self.decoder.shared], latents[:, :, self.decoder.shared :].flatten(1)], dim=1)

    def inject(self, z: Tensor, features: Tensor) -> Tensor:
        """Return latent vectors z (P, D) with features (P, V, F) of their examples, if the decoder takes any, and else z."""
        if self.decoder.inject is None:
            return z
        latents = self.decoder.inject(self._unpack(z).reshape(-1, *self.decoder.shape), features.flatten(0, 1))
        return torch.cat([self._pack(latents.reshape(len(z), self.examples, -1)), z[:, self.size :]], dim=1)

    def encode(self, starts: Sequence[Tensor], rngs: Sequence[Generator], device: str) -> Tensor:
        """Return the latent vectors (P, D) on `device` from which P searches start.

        starts: for each search, the examples (V, *shape) to start from.
        rngs: for each search, a generator that draws the logits of soft labels; used only if `joint`.
        Raises ValueError if a function of the decoder fails, or does not keep to the shapes that the decoder states.
        """
        x = torch.cat(list(starts)).to(device)
        check_shapes(self.decoder, self.decoder_name, x)
        parts = [self._pack(self.decoder.encode(x).reshape(len(starts), self.examples, -1))]
        if self.joint:
            shape = (self.examples * self.data.num_classes,)
            parts.append(torch.stack([torch.randn(shape, generator=g) for g in rngs]).to(device))
        if self.drawn is not None:
            parts.append(self.drawn.to(device).expand(len(starts), -1))
        if self.surrogate:
            parts.append(torch.zeros(len(starts), 1, device=device))
        return torch.cat(parts, dim=1)

    def split_into_phases(self, optimiser: Optimiser) -> Optimiser:
        """Return the optimiser that changes the decoder's phases in turn, or `optimiser` itself without phases."""
        sizes = self.decoder.phases
        return PhasedOptimiser(optimiser, sizes, self.examples, self.decoder.lengths) if sizes else optimiser

    def measure_latents(self, z: Tensor) -> Tensor:
        """Return the mean square of the latents of examples in a latent vector z (D,), added over phases, a 0-d tensor."""
        latents = self._unpack(z)
        sizes = list(self.decoder.phases or (latents.shape[1],))
        return torch.stack([part.square().mean() for part in torch.split(latents, sizes, dim=1)]).sum()

    def project(self, z: Tensor) -> Tensor:
        """Return z (P, D), with the latents of examples projected into the decoder's box if `boxed` is set and there is a box.

        A decoder that shares values (`Decoder.shared`) has no box: the result is then z.
        """
        if not self.boxed or self.decoder.shared:
            return z
        latents = self.decoder.project(z[:, : self.size].reshape(-1, *self.decoder.shape))
        return torch.cat([latents.reshape(len(z), -1), z[:, self.size :]], dim=1)
