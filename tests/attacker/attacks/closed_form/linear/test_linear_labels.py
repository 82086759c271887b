"""Tests of the labels and norms of a recovered batch, and of the mixture that R-GAP returns for a batch."""

import pytest
import torch
from linear_batches import DATA, Tensors, batch, gradient_of, layers, network, recover
from torch import Tensor, nn

from attacker.attacks.closed_form.linear.batch_labels import LabelledExamples, explain_batch
from attacker.attacks.closed_form.rgap.recursion import DEFAULT_RGAP, PAPER_RGAP, RgapSettings, solve_last_layer, solve_layers
from attacker.attacks.networks.chain import read_chain
from fedsim import models
from fedsim.recording import ModelSpec

BOUNDS = (torch.zeros(DATA.shape), torch.ones(DATA.shape))


def explained(model: nn.Module, x: Tensor, y: Tensor, loss: str = "cross_entropy") -> tuple[LabelledExamples, Tensors]:
    weights, gradient = gradient_of(model, x, y, loss)
    answer = recover(model, weights, gradient, len(x))
    return explain_batch(read_chain(model, DATA.shape), weights, loss, answer, len(x), bounds=BOUNDS), gradient


def measure_misfit(model: nn.Module, found: LabelledExamples, gradient: Tensors, loss: str = "cross_entropy") -> float:
    """Return the distance between the gradient of the recovered batch and the observed one, relative to its norm."""
    simulated = gradient_of(model, DATA.denormalise(found.x.reshape(-1, *DATA.shape)).float(), found.y, loss)[1]
    pairs = [(simulated[name].double(), g.double()) for name, g in gradient.items()]
    return float(sum((a - b).square().sum() for a, b in pairs) ** 0.5 / sum(b.square().sum() for _, b in pairs) ** 0.5)


def labels_by_example(found: LabelledExamples, x: Tensor) -> list[tuple[int, int]]:
    nearest = torch.cdist(found.x, DATA.normalise(x).flatten(1).double()).argmin(dim=1)
    return sorted(zip(nearest.tolist(), found.y.tolist(), strict=True))


@pytest.mark.parametrize("hidden", [(256,), (256, 64)])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_labels_are_right_and_reproduce_the_gradient(size: int, hidden: tuple[int, ...]) -> None:
    model, (x, y) = network(hidden), batch(size)
    found, gradient = explained(model, x, y)
    assert labels_by_example(found, x) == list(enumerate(y.tolist()))
    assert measure_misfit(model, found, gradient) < 1e-6
    assert float(found.misfit.max()) < 1e-5


def test_labels_are_right_on_a_trained_network() -> None:
    model, (x, y) = network(steps=50), batch(8)
    found, gradient = explained(model, x, y)
    assert labels_by_example(found, x) == list(enumerate(y.tolist()))
    assert measure_misfit(model, found, gradient) < 1e-5


@pytest.mark.parametrize("other", [0, 3])
def test_duplicate_example_gets_both_of_its_labels(other: int) -> None:
    model, (x, y) = network(), batch(4)
    x, y = torch.cat([x, x[:1]]), torch.cat([y, (y[:1] + other) % 10])
    found, gradient = explained(model, x, y)
    assert len(found.x) == 5
    assert sorted(found.y.tolist()) == sorted(y.tolist())
    assert measure_misfit(model, found, gradient) < 1e-6


@pytest.mark.parametrize(("outputs", "loss"), [(10, "cross_entropy"), (1, "logistic")])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_without_bias_the_loss_determines_the_norm(outputs: int, loss: str, size: int) -> None:
    model, (x, y) = layers(outputs=outputs, bias=False), batch(size)
    y = y if outputs == 10 else y % 2
    found, gradient = explained(model, x, y, loss)
    true = DATA.normalise(x).flatten(1).double()
    if found.twins.any():  # two multiples of an example that explain the gradient equally well
        assert loss == "logistic"
    else:
        assert float(torch.cdist(true, found.x).amin(dim=1).max()) < 1e-4
    assert measure_misfit(model, found, gradient, loss) < 1e-5


def test_labels_of_an_unseparated_batch_are_refused() -> None:
    model, (x, y) = layers(activation=nn.Sigmoid), batch(4)
    weights, gradient = gradient_of(model, x, y)
    answer = recover(model, weights, gradient, 4)
    with pytest.raises(ValueError, match="labels cannot be found"):
        explain_batch(read_chain(model, DATA.shape), weights, "cross_entropy", answer, 4)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("rgap", [DEFAULT_RGAP, PAPER_RGAP], ids=["ours", "paper"])
def test_r_gap_gives_a_mixture_of_a_batch(size: int, rgap: RgapSettings) -> None:
    """For FCN3 with the logistic loss (R-GAP, section 4.4), the answer lies in the span of the examples but equals none."""
    data = DATA.__class__(shape=DATA.shape, num_classes=2)
    model = models.build(ModelSpec(name="fcn3"), data, seed=0)
    (x, y) = batch(size)
    weights, gradient = gradient_of(model, x, y % 2, "logistic")
    stacked = [{name: t[None].double() for name, t in tensors.items()} for tensors in (weights, gradient)]
    chain = read_chain(model, data.shape)
    point = solve_last_layer(chain, *stacked, "logistic")[0]
    answer = solve_layers(chain, *stacked, point, rgap).f.flatten().double()
    true = x.flatten(1).double()
    shares = torch.linalg.lstsq(true.T, answer[:, None]).solution[:, 0]
    assert float((answer - shares @ true).norm() / answer.norm()) < 1e-5  # the paper's variant rounds to float32 between layers
    unit = shares.abs() / shares.abs().sum()
    assert int((unit > 0.01).sum()) > 1
    cosine = torch.nn.functional.cosine_similarity(true, answer[None]).abs()
    assert float(cosine.max()) < 0.999
