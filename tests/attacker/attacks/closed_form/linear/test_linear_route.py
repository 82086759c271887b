"""Tests of the closed form (route) `linear` of the attack `exact`: all examples of a batch, their labels, and duplicates."""

import pytest
import torch
from observations import observe_steps
from sklearn.datasets import load_digits

from attacker.attacks import Case, exact
from fedsim.recording import DataSpec, ModelSpec, Observation

DATA = DataSpec(shape=(1, 8, 8), num_classes=10, mean=(0.3,), std=(0.4,))
MLP = ModelSpec(name="mlp", arguments={"hidden": [256]})


def batch(*indices: int) -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    at = list(indices)
    return torch.from_numpy(digits.images[at]).float()[:, None] / 16, torch.from_numpy(digits.target[at])


def answer(observation: Observation, **arguments: object) -> object:
    return exact(**arguments)([Case((observation,))], rng=torch.Generator().manual_seed(0))[0]


@pytest.mark.parametrize("indices", [(3,), (3, 14), (3, 14, 15, 92), (7, 1, 8, 28, 18, 2)])
def test_all_examples_behind_relu_are_found_with_their_labels(indices: tuple[int, ...]) -> None:
    x, y = batch(*indices)
    found = answer(observe_steps((x, y), model=MLP, data=DATA))
    assert found.route == "linear"
    distance = (found.x[:, None] - x[None]).square().flatten(2).mean(dim=2)
    match = distance.argmin(dim=0)
    assert sorted(match.tolist()) == list(range(len(indices)))
    assert float(distance.amin(dim=0).max()) < 1e-8
    assert found.y[match].tolist() == y.tolist()
    assert float(found.loss) < 1e-10
    assert float(found.confidence.min()) > 0.9


def test_duplicate_example_is_returned_twice() -> None:
    x, y = batch(3, 14, 14)
    found = answer(observe_steps((x, y), model=MLP, data=DATA))
    assert found.route == "linear"
    assert sorted(found.y.tolist()) == sorted(y.tolist())
    assert float((found.x[:, None] - x[None]).square().flatten(2).mean(dim=2).amin(dim=0).max()) < 1e-8
    assert any("rank 2 for 3 examples" in note for note in found.notes)


def test_inseparable_batch_is_searched_for_and_noted() -> None:
    """Without zeros in the gradient, the examples cannot be separated: `exact` searches instead, and route="linear" raises."""
    x, y = batch(3, 14)
    data = DataSpec(shape=(1, 8, 8), num_classes=10)
    found = answer(observe_steps((x, y), model=ModelSpec(name="fcn3"), data=data), steps=1)
    assert found.route.startswith("optimisation")
    assert any("mixture" in note for note in found.notes)
    with pytest.raises(ValueError, match="mixture"):
        answer(observe_steps((x, y), model=ModelSpec(name="fcn3"), data=data), route="linear")


def test_convolutions_have_no_linear_route() -> None:
    x, y = batch(3, 14)
    with pytest.raises(ValueError, match="the first layer, 0, is a convolution"):
        answer(observe_steps((x, y), model=ModelSpec(name="lenet_dlg"), data=DATA), route="linear")
