"""The prior of a search: terms of its loss that favour plausible examples, with the total variation and its weight.

Also the consensus of several starts, which attracts each of them (Yin et al. 2021, "See through gradients: image batch recovery
via GradInversion", section 3.4, eq. 11). The paper registers images by RANSAC-flow; here they are shifted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacker.attacks.simulation.client import sends_signs
from fedsim.recording.observation import Observation

Belief = Callable[[Tensor], Tensor]
"""Maps examples x (N, *shape) in [0, 1] to a 0-d tensor that is added to the loss."""

Denoise = Callable[[Tensor], Tensor]
"""Maps images (N, C, H, W) to images of the same shape with less noise."""

NEIGHBOUR_CONTRAST = 0.15
"""Scale of the Laplace distribution assumed for differences of neighbouring pixels in [0, 1]. It was chosen among a few values,
as the one with which photographs were recovered best from noisy gradients."""

COSINE_MAP_TV = 0.5
"""`Prior.map_tv` of searches for pixels by cosine and Adam. It was chosen among 0.3, 0.5 and 1 on single images and batches of
four of the tuning part of CIFAR-10, for signal-to-noise ratios of 0, 10 and 20 dB."""

COLOUR_MAP_TV = 0.25
"""The same with `colour_variation`, which is larger for the same image. It was chosen among 0.06, 0.1, 0.15, 0.25 and 0.5 on six
images of the tuning part of CIFAR-10, for ratios of 0 and 10 dB. At 0 dB smaller weights were better, but at 64x64 pixels larger
ones (benchmarks/results, tuning and rog)."""

COLOUR_AXES = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))
"""Axes of the space of RGB values, not normalised: brightness, red against blue, and green against both."""
COLOUR_WEIGHTS = (1.0, 2.5, 4.0)
"""Weights of the total variation along `COLOUR_AXES` in `colour_variation`. In photographs of 64x64 pixels (tuning part of the
ImageNet sample), neighbouring pixels differ 4.6 and 10 times less along the second and the third axis than along the first, in
CIFAR-10 12 and 20 times. On tuning and validation images, weaker weights reconstructed images better (benchmarks, rog)."""

CONTINUATION_SHARE = 0.4
"""Share of a search's steps over which the weight of the total variation falls, see `VariationTerm`. With it, the weight has
fallen when the schedule of Inverting Gradients first lowers the learning rate."""

MAX_NOISE_RATIO = 100.0
"""Upper limit of the ratio of noise to signal in the squared norm of a gradient that `convert_weight_to_cosine` assumes."""


def total_variation(x: Tensor) -> Tensor:
    """Return the sum of the mean absolute differences of vertical and of horizontal neighbours, over all of x, a 0-d tensor.

    x: images (N, C, H, W).
    Source: Geiping et al. 2020, as in their code. An axis of one pixel contributes 0.
    """
    down, across = x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]
    return torch.stack([t.abs().sum() / max(1, t.numel()) for t in (down, across)]).sum()


def colour_variation(x: Tensor) -> Tensor:
    """Return the total variation along three axes of the RGB values, times `COLOUR_WEIGHTS`, a 0-d tensor.

    Photographs vary in brightness much more than in colour, which `total_variation` of single channels does not use. Both are
    equal for grey images. For images that do not have three channels, the result is that of `total_variation`.
    x: images (N, C, H, W).
    """
    if x.shape[-3] != len(COLOUR_AXES):
        return total_variation(x)
    axes = torch.tensor(COLOUR_AXES, dtype=x.dtype, device=x.device)
    weights = torch.tensor(COLOUR_WEIGHTS, dtype=x.dtype, device=x.device) * (3 / axes.square().sum(dim=1)).sqrt()
    return total_variation(torch.einsum("kc,...chw->...khw", weights[:, None] * axes, x))


@dataclass(frozen=True, kw_only=True)
class DenoiserTerm:
    """A term of the loss that keeps images near those that a denoiser returns.

    denoise: map of images (N, C, H, W) to denoised ones. weight: of `measure_noise`, above 0.
    noise: standard deviation of noise that is added to the images before they are denoised, at the first step of a search; it
           falls linearly to 0 at the last step. A denoiser of every noise level is a diffusion model, and this term is then the
           model's prior without the weights of noise levels (Mardani et al. 2024, RED-diff, eq. 12). 0 for RED.
    """

    denoise: Denoise
    weight: float
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True)
class VariationTerm:
    """How the total variation of a `Prior` is measured, and how its weight changes.

    measure:      function of images (N, C, H, W): `total_variation` or `colour_variation`.
    continuation: ratio, at least 1, of the weight at the first step to the weight after the share `CONTINUATION_SHARE` of the
                  steps. In between, it falls geometrically. A large weight at first keeps a search from details that fit only a
                  part of the gradient, and the small one at last leaves details in the images (continuation, as in Hale et al.
                  2008, "Fixed-point continuation for l1-minimization"). 1 for a constant weight. The weight of a MAP estimate
                  (`Prior.map_tv`) is constant.
    sign_factor:  factor of the weight if clients send only the signs of an update, see `Prior.adapt_to`.
    """

    measure: Callable[[Tensor], Tensor] = total_variation
    continuation: float = 1.0
    sign_factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.continuation >= 1:
            raise ValueError(f"the continuation of total variation must be at least 1, got {self.continuation}")

    def compute_excess(self, share: float) -> float:
        """Return the ratio of the weight to the one at the end, minus 1, after a share, in [0, 1], of the search's steps."""
        return float(self.continuation ** max(0.0, 1 - share / CONTINUATION_SHARE)) - 1


@dataclass(frozen=True, kw_only=True)
class Prior:
    """The prior of a search.

    tv:       weight of the total variation of pixels in [0, 1], relative to the distance between the observed
              gradient and a zero gradient (weighted mean over observations; 1 for the cosine). No effect for table rows.
    variation: how total variation is measured, and how its weight changes during a search.
    map_tv:   for images, if the noise variance is known and the distance is squared or a cosine, add a total variation with
              `map_tv` times the weight of a MAP estimate, which follows from that variance, see `compute_map_tv_weight`.
    belief:   a further term of the loss, a function of the examples with the weight 1, times the factor by which all terms are
              multiplied if a known defense makes gradients small (`CaseBatch._compute_gain`); None for none.
    latent:   weight of the mean square of the latents (`LatentSpace.measure_latents`), relative to the same distance as `tv`. For
              latents with a standard normal prior, this is the term of a MAP estimate, up to its scale.
    denoiser: the term of a denoiser, whose weight is relative to the same distance as `tv`; None for none.
    """

    tv: float = 0.0
    variation: VariationTerm = VariationTerm()
    map_tv: float = 0.0
    belief: Belief | None = None
    latent: float = 0.0
    denoiser: DenoiserTerm | None = None

    def adapt_to(self, observation: Observation) -> "Prior":
        """Return this prior with `tv` times the `sign_factor` if the client declares that it sends signs, and else unchanged."""
        return replace(self, tv=self.variation.sign_factor * self.tv) if sends_signs(observation) else self

    @property
    def in_units_of_loss(self) -> bool:
        """Whether `latent` or the denoiser has a weight, which is relative to the distance from a zero gradient, as `tv` is."""
        return self.latent > 0 or self.denoiser is not None


def measure_noise(x: Tensor, denoise: Denoise, noise: Tensor | None = None) -> Tensor:
    """Return half the mean squared difference of images x (N, C, H, W) and the denoised images D(x), a 0-d tensor.

    D(x) counts as constant when the result is differentiated, so that the gradient is (x - D(x)) divided by the number of values,
    as in regularisation by denoising (Romano et al. 2017, RED, eq. 12).
    noise: added to the images before they are denoised, (N, C, H, W); None for none.
    """
    noisy = x.detach() if noise is None else x.detach() + noise
    return (x - denoise(noisy).detach()).square().mean() / 2


def check_denoiser(denoiser: Denoise, x: Tensor) -> None:
    """Raise ValueError unless a denoiser maps images x (N, C, H, W), on the device of the search, to a tensor of that shape.

    This check calls the denoiser once. If the denoiser is a network, this call also moves it to that device, before a search
    calls it under torch.func's transforms.
    """
    denoised: object = denoiser(x)
    if not isinstance(denoised, Tensor) or denoised.shape != x.shape:
        got = tuple(denoised.shape) if isinstance(denoised, Tensor) else type(denoised).__name__
        raise ValueError(f"a denoiser must map images {tuple(x.shape)} to images of the same shape, got {got}")


def compute_map_tv_weight(variance: Tensor, values: int) -> Tensor:
    """Return the weight of the total variation beside the squared distance, for a MAP estimate under Gaussian noise.

    The negative log-likelihood of Gaussian noise is distance / (2 variance), with the squared distance of gradients. If the
    differences of neighbouring pixels have a Laplace distribution with scale NEIGHBOUR_CONTRAST, the negative log-prior is about
    values / NEIGHBOUR_CONTRAST * total_variation. Multiplied by 2 variance, their sum is distance + weight * total_variation.
    variance: of the noise of each gradient coordinate. values: number of pixel values of all examples together.
    """
    return 2 * variance * values / NEIGHBOUR_CONTRAST


def convert_weight_to_cosine(weight: Tensor, received: Tensor, noise: Tensor) -> Tensor:
    """Return the weight beside the cosine distance that corresponds to a weight beside the squared distance.

    For a simulated gradient with the norm S of the gradient before the noise, and an observed gradient with norm R, the squared
    distance is 2 S R times the cosine distance, plus a constant. S^2 is estimated as R^2 minus the power of the noise, but as at
    least that power divided by MAX_NOISE_RATIO.
    received: R^2. noise: power of the noise, its expected squared norm. All have equal shapes.
    """
    signal = (received - noise).maximum(noise / MAX_NOISE_RATIO)
    return weight / (2 * (signal * received).sqrt()).clamp(min=torch.finfo(weight.dtype).tiny)


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """The settings of group consistency, a term that makes the candidates of all starts of a case similar.

    weight:     weight of the mean squared difference between a candidate and the consensus, relative to the same distance as
                `Prior.tv`; above 0.
    registered: whether images are shifted onto the mean before the consensus is computed, see `compute_consensus`.
    """

    weight: float
    registered: bool = False

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"the weight of group consistency must be above 0, got {self.weight}; leave the term out instead")


def compute_consensus(x: Tensor, groups: Tensor, *, registered: bool = False) -> Tensor:
    """Return the consensus of each candidate's group, in the shape of x: the mean over the candidates of that group.

    x: the examples (P, V, *shape) of P candidates. groups: number of the group of each candidate, (P,).
    registered: if x are images, shift each onto that mean (`shift_onto`), and return the mean of the shifted images.
    """
    mean = _average(x, groups)
    if not registered or x.ndim != 5:
        return mean
    return _average(shift_onto(x.flatten(0, 1), mean.flatten(0, 1)).view_as(x), groups)


def shift_onto(x: Tensor, reference: Tensor) -> Tensor:
    """Return images x (N, C, H, W), each shifted cyclically by the whole numbers of pixels that fit it best to `reference`.

    The shift is at the peak of the phase correlation (Kuglin & Hines 1975) of both images, summed over channels.
    """
    cross = (torch.fft.fft2(reference) * torch.fft.fft2(x).conj()).sum(dim=1)
    correlation = torch.fft.ifft2(cross / cross.abs().clamp(min=torch.finfo(x.dtype).tiny)).real
    (height, width), peak = x.shape[-2:], correlation.flatten(1).argmax(dim=1)[:, None]
    rows = (torch.arange(height, device=x.device) - peak // width) % height
    columns = (torch.arange(width, device=x.device) - peak % width) % width
    each = torch.arange(len(x), device=x.device)[:, None, None]
    return x[each, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def _average(x: Tensor, groups: Tensor) -> Tensor:
    count = int(groups.max()) + 1
    sums = x.new_zeros(count, *x.shape[1:]).index_add(0, groups, x)
    sizes = torch.bincount(groups, minlength=count).clamp(min=1).to(x)
    return (sums / sizes.view(-1, *(1,) * (x.ndim - 1)))[groups]
