"""The class-conditional generator of learned priors, a small variational autoencoder, and the search for images that it can make.

Its decoder consists of stages, which give a search several sets of variables to choose from: the latent vector, the feature maps
between two stages, and the weights of all stages. The search in its latents finds images that resemble given ones (Yue et al.
2022, ROGS).
"""

from collections.abc import Mapping
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import interpolate

from attacker.attacks.learned.networks import activate
from attacker.attacks.learned.perceptual import Lpips, explain_missing, load
from attacker.attacks.optimisers.balls import FrankWolfe, project_onto_ball
from attacker.attacks.optimisers.descent import Problems, descend
from attacker.attacks.optimisers.first_order import Adam, Optimiser
from attacker.attacks.optimisers.stopping import Stop

STRIDE = 8
"""Ratio of the sides of an image and of the feature maps after the first stage."""
SEARCH_STEPS = 300
"""Steps of the search. The paper takes 1000 from a random latent; this search begins at the encoder's latent."""
RATE = 0.05
"""Learning rate of Adam, which the paper does not state."""
DELAY = 20
"""`FrankWolfe.delay`, with which the first step keeps 0.91 of the encoder's latent."""
SEARCH_OPTIMISERS = ("adam", "frank_wolfe")


class ImageGenerator(nn.Module):
    """A conditional variational autoencoder (Kingma & Welling 2014, Sohn et al. 2015) of square images in [0, 1].

    Its latents have a standard normal prior. The encoder does not see the label.
    width: channels at full resolution, doubled at each lower one, up to 4 * width. latents: length of the latent vector.
    classes: number of classes; 1 for a generator without labels. side: of the images, a multiple of `STRIDE`.
    feature_shapes: shapes (C, H, W) of the results of all stages but the last.
    Raises ValueError for a side that is not a multiple of `STRIDE`.
    """

    def __init__(self, width: int = 16, latents: int = 128, classes: int = 1, side: int = 32) -> None:
        super().__init__()
        if side % STRIDE:
            raise ValueError(f"the side of a generator's images must be a multiple of {STRIDE}, got {side}")
        self.latents, self.classes, self.side, self.smallest_side = latents, classes, side, side // STRIDE
        widths = (width, 2 * width, 4 * width, 4 * width)
        self.wide = widths[-1]
        self.feature_shapes = [
            (w, self.smallest_side * 2**level, self.smallest_side * 2**level) for level, w in enumerate(widths[:0:-1])
        ]
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 4, stride=2, padding=1) for a, b in pairwise(widths))
        self.code = nn.Linear(self.wide * self.smallest_side**2, 2 * latents)
        self.classes_seen = nn.Embedding(classes, latents)
        self.expand = nn.Linear(2 * latents, self.wide * self.smallest_side**2)
        self.up = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in reversed(list(pairwise(widths))))
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and logarithms of variances, each (N, latents), of the latents of images (N, 3, side, side)."""
        features = self.enter(x)
        for shrink in self.down:
            features = shrink(activate(features))
        mean, log_variance = self.code(activate(features).flatten(1)).chunk(2, dim=1)
        return mean, log_variance.clamp(-10, 10)

    def run_stage(self, stage: int, inputs: Tensor, y: Tensor) -> Tensor:
        """Return the result of one stage: feature maps, or images (N, 3, side, side) in [0, 1] from the last one.

        stage: from 0. inputs: latents (N, latents) for stage 0, and the result of the stage before for all others.
        y: labels (N,), or probabilities of classes (N, classes); only stage 0 uses them.
        """
        if stage == 0:
            seen = y @ self.classes_seen.weight if y.ndim == 2 else self.classes_seen(y)
            first: Tensor = self.expand(torch.cat([inputs, seen], dim=1))
            return first.reshape(-1, *self.feature_shapes[0])
        grown = interpolate(activate(inputs), scale_factor=2, mode="bilinear", align_corners=False)
        result: Tensor = self.up[stage - 1](grown)
        return (1 + self.leave(activate(result)).tanh()) / 2 if stage == len(self.up) else result

    def decode(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the images (N, 3, side, side) in [0, 1] of latents z (N, latents) and labels y, as in `run_stage`."""
        for stage in range(len(self.up) + 1):
            z = self.run_stage(stage, z, y)
        return z

    def forward(self, x: Tensor, y: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
        """Return images decoded from sampled latents of images x, and the mean KL divergence of those latents per value of x."""
        mean, log_variance = self.encode(x)
        noise = torch.randn(mean.shape, generator=rng).to(mean)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
        return self.decode(mean + (log_variance / 2).exp() * noise, y), divergence / x.numel()


def match_images(
    network: ImageGenerator, x: Tensor, y: Tensor, *, perceptual: Lpips | None = None, steps: int = 0, optimiser: str = "adam"
) -> Tensor:
    """Return images of the generator that are near the images x, found by a search in its latents that starts at the encoder's.

    For each image, the result of the step with the least distance (`measure_distance`) is returned. The distance is the root mean
    square difference plus LPIPS.
    x: (N, 3, side, side) in [0, 1]. y: labels (N,), or probabilities of classes (N, K); a generator with one class ignores y.
    perceptual: LPIPS, a part of the distance; None to leave it out. steps: 0 for `SEARCH_STEPS`.
    optimiser: adam, or frank_wolfe in the ball whose radius is the square root of the number of latents, near which standard
    normal latents lie.
    Raises ValueError if the generator makes images of another shape, and for another optimiser.
    """
    wanted = (3, network.side, network.side)
    if tuple(x.shape[1:]) != wanted:
        raise ValueError(
            f"the generator makes images of shape {wanted}, and the images to match have shape {tuple(x.shape[1:])}; train a "
            "generator of that size"
        )
    if optimiser not in SEARCH_OPTIMISERS:
        raise ValueError(f"unknown optimiser {optimiser!r} of the generator's latents. Known: {', '.join(SEARCH_OPTIMISERS)}")
    network = network.to(x.device)
    labels = y if network.classes > 1 else torch.zeros(len(x), dtype=torch.long, device=x.device)

    def evaluate(z: Tensor, rows: Mapping[str, Any], share: float) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            loss = measure_distance(network.decode(z, rows["labels"]), rows["x"], perceptual)
            (slope,) = torch.autograd.grad(loss.sum(), [z])
        return slope, loss.detach()

    radius = sqrt(network.latents)
    inside = optimiser == "frank_wolfe"
    chosen: Optimiser = FrankWolfe(radius=radius, delay=DELAY) if inside else Adam(learning_rate=RATE, decay_at=())
    problems = Problems(
        evaluate=evaluate,
        per_problem={"x": x, "labels": labels},
        project=lambda z: z,  # steps of Frank-Wolfe stay inside, and Adam has no ball
        enough=torch.full((len(x),), -1.0, device=x.device),
    )
    start = network.encode(x)[0].detach()
    count = steps or SEARCH_STEPS
    minima = descend(
        project_onto_ball(start, radius) if inside else start, problems, chosen, count, Stop(patience=count, decrease=0.0)
    )
    return network.decode(torch.stack(minima.z), labels)


def measure_distance(generated: Tensor, x: Tensor, metric: Lpips | None) -> Tensor:
    """Return each pair's root mean square difference, plus LPIPS if given, (N,); the paper has the Euclidean distance."""
    distance = ((generated - x).square().flatten(1).mean(dim=1) + 1e-12).sqrt()
    return distance if metric is None else distance + metric.compare(generated, x)


def find_perceptual(shape: tuple[int, ...]) -> Lpips | None:
    """Return LPIPS with AlexNet; None if its weights are not in torch's hub cache, or images of this shape are too small."""
    try:
        return None if explain_missing("alex", shape) else load("alex")
    except (FileNotFoundError, ValueError):
        return None
