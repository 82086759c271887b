"""What a client drew at random, as variables of a search: the mixtures of MixUp and InstaHide, and the masks of dropout.

These variables follow the latents of the examples in a latent vector. They start where masks have no effect, and where each
example has the largest share in its own mixture. MixUp (Zhang et al. 2018) and InstaHide without flipped values (Huang et al.
2020) train on M x with labels M y, for a matrix M (N, N) whose rows are nonnegative and sum to 1. Dropout before the last layer
(Srivastava et al. 2014) multiplies features by masks (N, F).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor, nn

from attacker.attacks.networks.forward import record_inputs
from defenses.networks import Dropout
from defenses.rules import Weights
from fedsim.recording.observation import Observation

OWN_LOGIT = 1.0
"""Logit of an example's share in its own mixture at the start of a search; the logits of all other examples are 0."""


class _MaskLayer(nn.Module):
    """A layer in place of dropout that multiplies features by a mask, which is passed as a buffer in each forward pass."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


@dataclass(frozen=True)
class Draws:
    """The random draws of one local step as variables.

    examples: number N in the batch. mixes: whether examples are mixed. masks: dict from the name of each layer that replaces
    dropout (see `_replace_dropout`) to its number of features F and the probability p with which dropout drops a feature.
    """

    examples: int
    mixes: bool
    masks: Mapping[str, tuple[int, float]]

    @property
    def size(self) -> int:
        """Number of variables."""
        return self.examples * (self.mixes * self.examples + sum(features for features, _ in self.masks.values()))

    def start(self) -> Tensor:
        """Return the variables (size,) at the start: logits of the mixtures, and dropout that changes nothing.

        In its own mixture an example has the logit OWN_LOGIT, and all others have 0. Its share is the largest, but not always
        more than half: e / (e + N - 1) of N examples, which is 0.73 for N = 2 and 0.28 for N = 8.
        """
        mixed = [OWN_LOGIT * torch.eye(self.examples).flatten()] if self.mixes else []
        kept = [torch.full((self.examples * features,), log(1 / p - 1)) for features, p in self.masks.values()]
        return torch.cat([*mixed, *kept])

    def mix(self, z: Tensor, x: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Return the examples (N, *shape) and labels on which the client trains; z is a latent vector that ends in the variables.

        y: labels (N,), or probabilities (N, K). Mixed labels are probabilities.
        """
        if not self.mixes:
            return x, y
        shares = z[len(z) - self.size :][: self.examples**2].reshape(self.examples, self.examples).softmax(dim=1)
        soft = y if y.ndim == 2 else (y[:, None] == torch.arange(num_classes, device=y.device)).to(x.dtype)
        return (shares @ x.flatten(1)).reshape(x.shape), shares @ soft

    def build_buffers(self, z: Tensor) -> dict[str, Tensor]:
        """Return the masks (N, F) by buffer name: the probability that a feature was kept, divided by 1 - p."""
        buffers, at = {}, len(z) - self.size + self.mixes * self.examples**2
        for name, (features, p) in self.masks.items():
            mask_logits = z[at : at + self.examples * features].reshape(self.examples, features)
            buffers[f"{name}.mask"] = mask_logits.sigmoid() / (1 - p)
            at += self.examples * features
        return buffers


def _replace_dropout(model: nn.Module) -> dict[str, float]:
    """Replace the dropout of a defense by layers that take masks, and return each dropout's probability p by layer name.

    Dropout with p = 0 is left as it is.
    """
    rates = {name: module.p for name, module in model.named_modules() if isinstance(module, Dropout) and module.p > 0}
    for name in rates:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _MaskLayer())
    return rates


def find_draws(observation: Observation, model: nn.Module, weights: Weights) -> Draws | None:
    """Return the draws of the client of an observation as variables; None if the client declares no MixUp, InstaHide or dropout.

    model: the network; dropout layers that a defense added are replaced in place by layers that take masks. weights: of the
    model, by name.
    Raises ValueError if the update is not of one step, or if InstaHide inverts values, as it does by default, or mixes in public
    images: either adds about as many unknowns as the examples have values.
    """
    step, count = observation.inputs.step, observation.num_examples or 0
    dropped = _replace_dropout(model)
    if step is None and not dropped:
        return None
    if observation.training.count_step_examples(count) != (count,):
        raise ValueError(
            f"draws=true searches for random numbers that a client drew in one local step, and this client took several steps "
            f"for its {count} examples; set draws=false"
        )
    settings = {} if step is None else dict(step.arguments)
    if step is not None and step.name == "instahide" and (settings.get("public") or settings.get("flips", 0.5)):
        raise ValueError(
            "draws=true searches for the random numbers of InstaHide only with flips=0 and without public images, and this "
            f"client used {observation.inputs}; set draws=false"
        )
    x = torch.rand(1, *observation.data.shape, generator=torch.Generator().manual_seed(0))
    state = {**dict(model.named_buffers()), **{name: w.detach() for name, w in weights.items()}}
    x = observation.data.normalise(x.to(next(iter(weights.values()))))
    features = {name: record_inputs(model, state, x, layer=name)[0].shape[1] for name in dropped}
    return Draws(count, step is not None, {name: (features[name], p) for name, p in dropped.items()})
