"""Search in the latents of a generator for images that resemble given ones (Yue et al. 2022, ROGS)."""

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from attacker.attacks.learned.generator import ImageGenerator
from attacker.attacks.learned.perceptual import Lpips, explain_missing, load
from attacker.attacks.optimisers.balls import FrankWolfe, project_onto_ball
from attacker.attacks.optimisers.descent import Problems, descend
from attacker.attacks.optimisers.first_order import Adam, Optimiser
from attacker.attacks.optimisers.stopping import Stop

STEPS = 300
"""Steps of the search. The paper takes 1000 from a random latent; this search begins at the encoder's latent."""
RATE = 0.05
"""Learning rate of Adam, which the paper does not state."""
DELAY = 20
"""`FrankWolfe.delay`, with which the first step keeps 0.91 of the encoder's latent."""
SEARCH_OPTIMISERS = ("adam", "frank_wolfe")


def match_images(
    network: ImageGenerator,
    x: Tensor,
    y: Tensor,
    *,
    perceptual: Lpips | None = None,
    steps: int = 0,
    optimiser: str = "adam",
) -> Tensor:
    """Return images of the generator that are near the images x, found by a search in its latents that starts at the encoder's.

    For each image, the result of the step with the least distance (`measure_distance`) is returned. The distance is the root mean
    square difference plus LPIPS.
    x: (N, 3, side, side) in [0, 1]. y: labels (N,), or probabilities of classes (N, K); a generator with one class ignores y.
    perceptual: LPIPS, a part of the distance; None to leave it out. steps: 0 for `STEPS`. optimiser: adam, or frank_wolfe in the
    ball whose radius is the square root of the number of latents, near which standard normal latents lie.
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
    count = steps or STEPS
    minima = descend(
        project_onto_ball(start, radius) if inside else start, problems, chosen, count, Stop(patience=count, decrease=0.0)
    )
    return network.decode(torch.stack(minima.z), labels)


def measure_distance(generated: Tensor, x: Tensor, metric: Lpips | None) -> Tensor:
    """Return the root mean square difference of each pair of images, plus LPIPS if there is a metric, (N,).

    The paper adds the Euclidean distance, which grows with the number of pixels; the root mean square does not.
    """
    distance = ((generated - x).square().flatten(1).mean(dim=1) + 1e-12).sqrt()
    return distance if metric is None else distance + metric.compare(generated, x)


def find_perceptual(shape: tuple[int, ...]) -> Lpips | None:
    """Return LPIPS with AlexNet; None if its weights are not in torch's hub cache, or images of this shape are too small."""
    try:
        return None if explain_missing("alex", shape) else load("alex")
    except (FileNotFoundError, ValueError):
        return None
