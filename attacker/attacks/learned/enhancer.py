"""Enhancers: maps from reconstructed images to sharper ones, applied after a search; and denoisers, applied during a search.

To add one, write a function without arguments that returns a map of images (N, C, H, W), and select it on the command line with
`--set enhancer=module:function` or `--set denoiser=module:function`. A package can also register it as an entry point of the
group `attacker.enhancers` or `attacker.denoisers`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attacker.attacks.learned.generator import SEARCH_OPTIMISERS, ImageGenerator, find_perceptual, match_images
from attacker.attacks.learned.perceptual import load
from attacker.attacks.learned.prior_file import FILE_ENDING, read_prior
from defenses.registry import Registry

NO_ENHANCER = "none"
READY_FILE = Path(__file__).with_name("enhancer_small.safetensors")
"""The enhancer that this project ships, trained by benchmarks/rog.py."""


@dataclass(frozen=True)
class Enhancer:
    """A named map from images to enhanced ones, applied by calling the object.

    name: shown in the notes of a reconstruction; for a learned prior (a file) it includes a hash of its weights.
    sharpen: maps images (N, C, H, W) in [0, 1] to images of the same shape; its results are clamped to [0, 1] by `__call__`.
    uses_labels: whether `sharpen` takes the labels of the answer as a second argument: classes (N,), or probabilities (N, K).
    """

    name: str
    sharpen: Callable[..., Tensor]
    uses_labels: bool = False

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the enhanced images of x, (N, C, H, W), in [0, 1]. Values of x outside [0, 1] are clamped first.

        y: the labels of the answer, which only an enhancer with `uses_labels` needs.
        Raises ValueError if `sharpen` does not return a tensor of the same shape.
        """
        clamped = x.clamp(0, 1)
        enhanced: object = self.sharpen(clamped, y) if self.uses_labels else self.sharpen(clamped)
        if not isinstance(enhanced, Tensor) or enhanced.shape != x.shape:
            got = tuple(enhanced.shape) if isinstance(enhanced, Tensor) else type(enhanced).__name__
            raise ValueError(f"enhancer {self.name}: it must map images {tuple(x.shape)} to images of the same shape, got {got}")
        return enhanced.clamp(0, 1)


SharpenFactory = Callable[[], Callable[[Tensor], Tensor]]
"""Returns a map from images (N, C, H, W) to enhanced ones."""


def small() -> Callable[[Tensor], Tensor]:
    """Return the sharpening function of the shipped enhancer, a U-Net trained on public photographs, see docs/attacks.md."""
    return read_enhancer(READY_FILE).sharpen


def equalize() -> Callable[[Tensor], Tensor]:
    """Return a map that divides each image by its largest value, and equalises the histogram of each of its channels.

    This is how Yue et al. 2022 (ROG) treat images that are reconstructed from signs of an update.
    """
    from torchvision.transforms.v2.functional import equalize as equalize_image

    def spread(x: Tensor) -> Tensor:
        largest = x.abs().amax(dim=(1, 2, 3), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        result: Tensor = equalize_image(x / largest)
        return result

    return spread


DENOISERS: Registry[SharpenFactory] = Registry("attacker.denoisers", {})
BUILT_IN_ENHANCERS: dict[str, SharpenFactory] = {"small": small, "equalize": equalize}
ENHANCERS: Registry[SharpenFactory] = Registry("attacker.enhancers", BUILT_IN_ENHANCERS)


def find_enhancer(name: str, lpips_weights: str = "") -> Enhancer | None:
    """Return the enhancer that `name` selects: a registered name, a file or `module:function`; None for "none".

    If the file holds a generator, @ and a name of `SEARCH_OPTIMISERS` may follow it, as in "faces.safetensors@frank_wolfe".
    lpips_weights: as for `read_enhancer`.
    Raises ValueError for an unknown name, and for a file that holds no enhancer.
    """
    if name == NO_ENHANCER:
        return None
    path, _, optimiser = name.rpartition("@") if FILE_ENDING + "@" in name else (name, "", "adam")
    if path.endswith(FILE_ENDING):
        return read_enhancer(Path(path), optimiser=optimiser, lpips_weights=lpips_weights)
    factory = ENHANCERS[name]
    return read_enhancer(READY_FILE) if factory is small else Enhancer(name, factory())


def read_enhancer(path: Path, *, optimiser: str = "adam", lpips_weights: str = "") -> Enhancer:
    """Return the enhancer in a file that `attacker train-prior` wrote: a network that enhances, or a search with a generator.

    optimiser: of the search with a generator, as in `match_images`. lpips_weights: file of AlexNet's weights for LPIPS in that
    search, as in `perceptual.load`; "" for the file in torch's hub cache. If that cache has none, the search uses no LPIPS. The
    name of a generator's enhancer states the optimiser and whether LPIPS is used.
    Raises ValueError, naming the file, if it holds neither of the two; for an unknown optimiser, or one other than "adam" without
    a generator; and, like FileNotFoundError, as `perceptual.load` for the file `lpips_weights`.
    """
    prior = read_prior(path, "enhancer", "generator", "upscaler")
    if isinstance(prior.network, ImageGenerator):
        generator, shape = prior.network, (3, prior.network.side, prior.network.side)
        metric = load("alex", Path(lpips_weights)) if lpips_weights else find_perceptual(shape)
        name = f"{prior.name}, nearest images by {optimiser} {'without' if metric is None else 'with'} LPIPS"
        if optimiser not in SEARCH_OPTIMISERS:
            raise ValueError(f"unknown optimiser {optimiser!r} after {path}. Known: {', '.join(SEARCH_OPTIMISERS)}")

        def match(x: Tensor, y: Tensor) -> Tensor:
            return match_images(generator, x, y, perceptual=metric, optimiser=optimiser)

        return Enhancer(name, match, uses_labels=True)
    if optimiser != "adam":
        raise ValueError(
            f"{path} holds a prior of kind {prior.facts.kind}, and only a generator is searched with an optimiser; leave out "
            f"@{optimiser}"
        )
    return Enhancer(prior.name, lambda x: _apply_network(prior.network, x))


def find_denoiser(name: str) -> Callable[[Tensor], Tensor] | None:
    """Return the denoiser, a map of images (N, C, H, W), that `name` selects; None for "none".

    name: a file, `module:function`, or a registered name. Raises ValueError for an unknown name, and for a file that holds no
    denoiser.
    """
    if name == NO_ENHANCER:
        return None
    if name.endswith(FILE_ENDING):
        network = read_prior(Path(name), "denoiser").network
        return lambda x: _apply_network(network, x)
    return DENOISERS[name]()


def _apply_network(network: nn.Module, x: Tensor) -> Tensor:
    """Apply a network for colour images to images (N, C, H, W) of any size, with C = 1 or 3.

    Images are padded at the right and bottom to sides that the network's stride divides, and cropped to their size afterwards.
    A single channel is repeated three times, and the three channels of the result are averaged. Raises ValueError for another C.
    """
    if x.shape[1] not in (1, 3):
        raise ValueError(
            f"an enhancer or denoiser needs images of 1 or 3 channels, and these have {x.shape[1]}; leave it out of the attack"
        )
    height, width = x.shape[-2:]
    stride = int(network.stride)  # type: ignore[arg-type]
    padded = pad(x.float().expand(-1, 3, -1, -1), (0, -width % stride, 0, -height % stride), mode="replicate")
    here = next(network.parameters()).device == x.device  # under torch.func's transforms, where a denoiser runs, `to` crashes
    enhanced: Tensor = (network if here else network.to(x.device))(padded)[..., :height, :width]
    return enhanced if x.shape[1] == 3 else enhanced.mean(dim=1, keepdim=True)
