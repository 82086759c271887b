"""Tests that R-GAP in paper mode agrees with the authors' method, written with padded inputs and dense matrices [K; W; P]."""

from typing import Any

import numpy as np
import pytest
import torch
from generators import seed_default
from rgap_cases import ACTIVATIONS, Seen, mse, seen, two_convolutions
from torch import Tensor, nn
from torch.nn import functional

from attacker.attacks.closed_form.rgap.recursion import DEFAULT_RGAP, PAPER_RGAP, solve_layer
from attacker.attacks.networks.layers import Layer


@pytest.fixture(autouse=True)
def _weights_are_drawn_from_a_seed() -> Any:
    with seed_default(3):
        yield


def padded_system(layer: Layer, weight: Tensor, k: Tensor, z: Tensor, gradient: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Build the rows of K, W and P for the padded input, and their right-hand sides, by loops. k, z: (C_out, places)."""
    assert layer.kernel is not None
    (channels, height, width), (top, left), (down, across) = layer.product_inputs, layer.padding, layer.stride
    high, wide = height + 2 * top, width + 2 * left
    _, rows, columns = layer.product_outputs
    by_weight, by_k, border = [], [], []
    for f in range(layer.shape[0]):
        for i in range(rows):
            for j in range(columns):
                row = np.zeros((channels, high, wide))
                for (c, a, b), value in np.ndenumerate(weight[f].numpy()):
                    row[c, i * down + a, j * across + b] += value
                by_weight.append(row.ravel())
        for c in range(channels):
            for a in range(layer.kernel[0]):
                for b in range(layer.kernel[1]):
                    row = np.zeros((channels, high, wide))
                    for i in range(rows):
                        for j in range(columns):
                            row[c, i * down + a, j * across + b] += k[f, i, j].item()
                    by_k.append(row.ravel())
    for place in np.ndindex(channels, high, wide):
        if not (top <= place[1] < high - top and left <= place[2] < wide - left):
            row = np.zeros((channels, high, wide))
            row[place] = 1
            border.append(row.ravel())
    right = np.concatenate([gradient.numpy().ravel(), z.numpy().ravel(), np.zeros(len(border))])
    return np.stack([*by_k, *by_weight, *border]), right


def run_published_code(s: Seen) -> Tensor:
    """Run R-GAP as published, for convolutions with LeakyReLU(0.2) and a single logit, given the true label and logit."""
    mu = (2 * s.y.item() - 1) * s.model(s.x).item()
    k = torch.tensor(-(2 * s.y.item() - 1) / (1 + np.exp(mu)))
    head = s.chain.layers[-1]
    f = (s.gradient[head.weight][0, 0] / k).float().double()
    below = (s.weights[head.weight][0, 0] * k).float().double()
    for layer in reversed(s.chain.layers[:-1]):
        f, below = f.reshape(layer.outputs), below.reshape(layer.outputs)
        slope = torch.where(f >= 0, 1.0, 0.2).double()
        z, k = (f / slope).float().double(), (below * slope).float().double()
        weight = s.weights[layer.weight][0]
        matrix, right = padded_system(layer, weight, k, z, s.gradient[layer.weight][0])
        (top, left), (_, height, width) = layer.padding, layer.product_inputs
        x = np.linalg.lstsq(matrix, right, rcond=None)[0].reshape(layer.product_inputs[0], height + 2 * top, width + 2 * left)
        f = torch.from_numpy(x[:, top : top + height, left : left + width]).float().double()
        below = functional.conv_transpose2d(
            k[None], weight, stride=layer.stride, padding=layer.padding, output_padding=_left_over(layer)
        )[0]
        below = below.float().double()
    return f[None]


def _left_over(layer: Layer) -> tuple[int, ...]:
    assert layer.kernel is not None
    sides = zip(layer.product_inputs[1:], layer.product_outputs[1:], layer.stride, layer.padding, layer.kernel, strict=True)
    return tuple(taken - (given - 1) * stride + 2 * padding - kernel for taken, given, stride, padding, kernel in sides)


def build_paper_network(*, first: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, first, 3, stride=2, padding=1, bias=False), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(first, 8, 2, padding=1, bias=False), nn.LeakyReLU(0.2), nn.Flatten(), nn.LazyLinear(1, bias=False)),
    )


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("first", [6, 1])  # of full rank, and deficient
@pytest.mark.parametrize("y", [0, 1])
def test_paper_mode_agrees_with_the_authors_dense_matrices(first: int, y: int) -> None:
    model = build_paper_network(first=first)
    model(torch.zeros(1, 1, 6, 5))
    s = seen(model, (1, 6, 5), loss="logistic", rounded=True, y=y)
    s.model.double()
    wanted = run_published_code(s)
    ends = [s.solve(p, PAPER_RGAP) for p in s.readings() if bool(p.head.valid.all()) and p.head.y.item() == y]
    end = min(ends, key=lambda end: float(mse(end.f, wanted)))
    assert torch.allclose(end.f, wanted, atol=2e-4 * wanted.abs().max())
    assert (mse(wanted, s.x).item() < 1e-6) is (first == 6)


def test_paper_mode_rounds_to_float32_between_layers_and_ours_does_not() -> None:
    s = seen(two_convolutions(ACTIVATIONS["leaky"], bias=False))
    reading = s.readings()[0]
    paper, ours = (solve_layer(s.chain, s.weights, s.gradient, reading, rgap) for rgap in (PAPER_RGAP, DEFAULT_RGAP))
    for value in (paper.f, paper.gradient):
        assert value.dtype == torch.float64
        assert torch.equal(value, value.float().double())
    assert not torch.equal(ours.f, ours.f.float().double())
    assert mse(s.solve(reading, PAPER_RGAP).f, s.x).item() > 1e3 * mse(s.solve(reading).f, s.x).item()


def test_paper_mode_averages_over_outputs_and_ours_discounts_saturated_ones() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 7), nn.Sigmoid(), nn.Linear(7, 3))
    with torch.no_grad():
        model[1].bias[2] = 12
        model[3].weight[:, 2] *= 1e4  # so that its gradient is no smaller than others are
        model[3].bias -= model[3].weight[:, 2]
    s = seen(model, rounded=True)
    (reading,) = s.readings()
    paper, ours = (solve_layer(s.chain, s.weights, s.gradient, reading, rgap).f for rgap in (PAPER_RGAP, DEFAULT_RGAP))
    k = (reading.gradient * reading.f * (1 - reading.f))[0]
    mean = (s.gradient["1.weight"][0] / k[:, None]).mean(dim=0)
    assert torch.allclose(paper.flatten(), mean, rtol=1e-5)
    assert mse(ours, s.x).item() < 1e-11
    assert mse(paper, s.x).item() > 1e3 * mse(ours, s.x).item()


def test_paper_mode_leaves_out_zeros_of_a_relu() -> None:
    s = seen(two_convolutions(nn.ReLU))
    assert mse(s.best(PAPER_RGAP).f, s.x).item() < 1e-6
