"""Search in the latents of a generator for images that resemble given ones (Yue et al. 2022, ROGS)."""

import torch
from torch import Tensor

from attacker.attacks.learned.generator import ImageGenerator
from attacker.attacks.learned.perceptual import Lpips, explain_missing, load

STEPS = 300
"""Steps of Adam. The paper takes 1000 from a random latent; this search begins at the encoder's latent."""
RATE = 0.05
"""Learning rate of Adam, which the paper does not state."""


def match_images(network: ImageGenerator, x: Tensor, y: Tensor, *, perceptual: Lpips | None = None, steps: int = 0) -> Tensor:
    """Search by Adam for the generator's images that are nearest to the images x, and return them, (N, 3, side, side).

    The distance is the root mean square difference plus LPIPS.
    x: (N, 3, side, side) in [0, 1]. y: labels (N,), or probabilities of classes (N, K), of which a generator with one class uses
    none. steps: 0 for `STEPS`. perceptual: LPIPS; None for AlexNet's if its weights are in torch's hub cache, and otherwise no
    LPIPS.
    The paper adds the Euclidean distance, which grows with the number of pixels; the root mean square does not.
    Raises ValueError if the generator makes images of another shape.
    """
    wanted = (3, network.side, network.side)
    if tuple(x.shape[1:]) != wanted:
        raise ValueError(f"the generator makes images of shape {wanted}, got {tuple(x.shape[1:])}")
    network = network.to(x.device)
    labels = y if network.classes > 1 else torch.zeros(len(x), dtype=torch.long, device=x.device)
    metric = perceptual or find_perceptual(wanted)
    with torch.enable_grad():
        z = network.encode(x)[0].detach().requires_grad_()
        optimiser = torch.optim.Adam([z], lr=RATE)
        for _ in range(steps or STEPS):
            loss = measure_distance(network.decode(z, labels), x, metric).sum()
            optimiser.zero_grad()
            torch.autograd.backward(loss, inputs=[z])
            optimiser.step()
    return network.decode(z.detach(), labels)


def measure_distance(made: Tensor, x: Tensor, metric: Lpips | None) -> Tensor:
    """Return the root mean square difference of each pair of images, plus LPIPS if there is a metric, (N,)."""
    distance = ((made - x).square().flatten(1).mean(dim=1) + 1e-12).sqrt()
    return distance if metric is None else distance + metric.compare(made, x)


def find_perceptual(shape: tuple[int, ...]) -> Lpips | None:
    """Return LPIPS with AlexNet; None if its weights are not in torch's hub cache, or images of this shape are too small."""
    try:
        return None if explain_missing("alex", shape) else load("alex")
    except (FileNotFoundError, ValueError):
        return None
