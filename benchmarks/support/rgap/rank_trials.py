"""Checks of `analyse_rank`, which derives the rank of R-GAP's linear equations for each layer from the architecture alone.

The ranks of random networks are computed numerically as well. Networks like those of the paper (Zhu & Blaschko 2021) are also
here.
"""

from dataclasses import dataclass
from math import prod
from random import Random

import torch
from torch import Tensor, nn

from attacker.attacks.closed_form.rank.analysis import analyse_rank
from attacker.attacks.closed_form.rgap.footprint import find_used_values
from attacker.attacks.closed_form.rgap.system import EquationValues, LayerSystem, apply_maps
from attacker.attacks.networks.chain import Chain, read_chain

MAX_SYSTEM_ENTRIES = 2_500_000
"""Largest number of entries of a system that is stored as a matrix."""
TRIAL_STRIDES = ((1, 1), (1, 1), (1, 2), (2, 2), (1, 3))
PAPER_NETWORKS = {-484: (4,), 405: (3,), -208: (9, 4), 316: (6, 10, 4)}
"""Networks for the indices of the paper's table 2: channels of each 4x4 convolution, stride 1, no padding, inputs 3x32x32."""


@dataclass(frozen=True)
class RandomNetwork:
    """A random network.

    model: in float64, for inputs of `shape` (channels, height, width). chain: its layers, as the analysis reads them. words: its
    description.
    """

    model: nn.Sequential
    shape: tuple[int, ...]
    chain: Chain
    words: str


def make_paper_network(channels: tuple[int, ...]) -> nn.Sequential:
    """Return a network like those in figure 2 of R-GAP's paper, which were not released, for images 3x32x32.

    It has convolutions 4x4 with LeakyReLU and a linear layer, without biases. channels: of the output of each convolution.
    """
    layers: list[nn.Module] = []
    before, side = 3, 32
    for after in channels:
        layers += [nn.Conv2d(before, after, 4, bias=False), nn.LeakyReLU(0.2)]
        before, side = after, side - 3
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * side * side, 10, bias=False))


def make_random_network(seed: int) -> RandomNetwork:
    """Return a random network of one to three convolutions with kernels 2 to 5, strides 1 to 3, some dilated, for three classes.

    Each convolution is followed by LeakyReLU, tanh, sigmoid or nothing. With probability 1/4 there is average pooling before or
    after this activation; with LeakyReLU only before, since otherwise the rank would depend on the data. There may be a hidden
    linear layer. A network has biases with probability 1/2. Everything is drawn with `seed`.
    """
    for attempt in range(1000):
        drawn = _draw_network(Random(f"{seed} {attempt}"))
        if drawn is not None:
            return drawn
    raise RuntimeError(f"no valid network was drawn with seed {seed}; use another seed")


def _draw_network(rng: Random) -> RandomNetwork | None:
    shape = (rng.choice((1, 1, 2, 3)), rng.randint(5, 13), rng.randint(5, 13))
    bias, layers = rng.random() < 0.5, list[nn.Module]()
    channels = shape[0]
    for _ in range(rng.randint(1, 3)):
        after = rng.randint(2, 16)
        layers += _draw_convolution(rng, channels, after, bias=bias)
        channels = after
    layers.append(nn.Flatten())
    try:
        width = prod(nn.Sequential(*layers).to("meta")(torch.empty(1, *shape, device="meta")).shape[1:])
    except RuntimeError:  # the strides have reduced the image to nothing
        return None
    if rng.random() < 0.4:
        hidden = rng.randint(4, 20)
        layers += [nn.Linear(width, hidden, bias=bias), _draw_activation(rng)]
        width = hidden
    model = nn.Sequential(*layers, nn.Linear(width, 3, bias=bias)).to_empty(device="cpu").double()
    _fill(model, rng.randrange(2**31))
    chain = read_chain(model, shape)
    sizes = [prod(one.inputs) * (prod(one.outputs) + prod(one.shape)) for one in chain.layers if one.kernel]
    if max(sizes) > MAX_SYSTEM_ENTRIES:
        return None
    return RandomNetwork(model, shape, chain, f"{shape} {model}")


def _draw_convolution(rng: Random, before: int, after: int, *, bias: bool) -> list[nn.Module]:
    kernel = _draw_pair(rng, 2, 5)
    padding = _draw_padding(rng, kernel[0]), _draw_padding(rng, kernel[1])
    dilation = _draw_pair(rng, 1, 2) if rng.random() < 0.15 else (1, 1)
    layers: list[nn.Module] = [
        nn.Conv2d(before, after, kernel, _draw_pair(rng, *rng.choice(TRIAL_STRIDES)), padding, dilation, bias=bias),
        _draw_activation(rng),
    ]
    if rng.random() < 0.25:
        layers.insert(1 if isinstance(layers[1], nn.LeakyReLU) else rng.randint(1, 2), nn.AvgPool2d(2))
    return layers


def _draw_padding(rng: Random, side: int) -> int:
    return rng.randint(0, side - 1) if rng.random() < 0.6 else 0


def _draw_pair(rng: Random, low: int, high: int) -> tuple[int, int]:
    first = rng.randint(low, high)
    return first, first if rng.random() < 0.7 else rng.randint(low, high)


def _draw_activation(rng: Random) -> nn.Module:
    return rng.choice([nn.LeakyReLU(0.2), nn.LeakyReLU(0.2), nn.Tanh(), nn.Sigmoid(), nn.Identity()])


def _fill(model: nn.Module, seed: int) -> None:
    """Fill weights with random values of variance 1 / number of inputs, and biases with values of standard deviation 0.1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            scale = prod(weight.shape[1:]) ** -0.5 if weight.ndim > 1 else 0.1
            weight.copy_(scale * torch.randn(weight.shape, generator=generator, dtype=torch.float64))


def compute_slopes(network: RandomNetwork, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return a list of dL/dz of each layer, (1, *outputs), where z is what the layer's activation is applied to.

    L is the cross-entropy of one example x (1, *shape) with label y (1,).
    """
    weights = dict(network.model.named_parameters())
    reached = []
    for layer in network.chain.layers:
        given = layer.apply_weight(apply_maps(layer.before, x), weights[layer.weight])
        if layer.bias:
            given = given + weights[layer.bias].reshape(-1, *[1] * (given.ndim - 2))
        reached.append(apply_maps(layer.after, given))
        x = layer.activation.forward(reached[-1])
    return list(torch.autograd.grad(nn.functional.cross_entropy(x, y), reached))


def write_matrix(system: LayerSystem) -> Tensor:
    """Return the matrix (equations, unknowns) of the linear system for a layer's input: the system applied to unit vectors.

    First come the equations from the layer's weights, which give the layer's output, then the equations from the gradient of
    these weights. Rows are scaled to norm 1; rows that are 0 up to rounding become 0.
    """
    unknowns = prod(system.layer.inputs)
    rows = system.apply(torch.eye(unknowns, dtype=system.k.dtype).reshape(unknowns, *system.layer.inputs))
    matrix = torch.cat([rows.weights.flatten(1), rows.gradients.flatten(1)], dim=1).T
    lengths = matrix.norm(dim=1, keepdim=True)
    return torch.where(lengths > 1e-13 * lengths.max(), matrix / lengths, 0)


def compute_rank(matrix: Tensor) -> int:
    """Return the numerical rank of a matrix: the number of singular values above 1e-10 times the largest one."""
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-10))


def compute_numerical_ranks(network: RandomNetwork) -> list[int]:
    """Return for each layer the numerical rank of its equations for one random example."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, *network.shape, generator=generator, dtype=torch.float64)
    weights = {name: p.detach() for name, p in network.model.named_parameters()}
    ranks = []
    needed = [*find_used_values(network.chain)[1:], torch.ones(network.chain.layers[-1].outputs)]
    slopes = compute_slopes(network, x, torch.tensor([0]))
    for layer, known, k in zip(network.chain.layers, needed, slopes, strict=True):
        system = LayerSystem(layer, weights[layer.weight][None], k)
        system.scale = EquationValues(known[None].double(), torch.ones(1, 1, 1, dtype=torch.float64))
        ranks.append(compute_rank(write_matrix(system)))
    return ranks


def analyse_ranks(network: RandomNetwork, *, prove: int) -> list[int]:
    """Return for each layer the rank by `analyse_rank`.

    prove: the analysis computes a rank by elimination if the gradient leaves at most this many unknowns open, else by counting.
    """
    return [layer.rank for layer in analyse_rank(network.chain, prove=prove).layers]


def measure_right_share(count: int) -> float:
    """Return the share of `count` random networks for which the analysis gives the numerical rank of every layer."""
    networks = map(make_random_network, range(count))
    return sum(analyse_ranks(network, prove=3000) == compute_numerical_ranks(network) for network in networks) / count
