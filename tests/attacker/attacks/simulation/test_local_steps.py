"""Tests of the simulation of a client's local steps, and of separate examples for local epochs."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from attacker.attacks.simulation.client import compute_total_step, convert_to_gradient
from attacker.attacks.simulation.gradients import build_gradient
from attacker.attacks.simulation.local_steps import (
    assign_rows,
    build_stepped_gradient,
    count_separate_epochs,
    measure_disagreement,
    merge_epochs,
)
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training

DATA = DataSpec(shape=(6,), num_classes=3)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.1)])
def test_simulated_steps_agree_with_torch_and_differ_from_one_batch(momentum: float, decay: float) -> None:
    training = Training(learning_rate=0.3, batch_size=2, steps=3, momentum=momentum, weight_decay=decay)
    model = models.build(ModelSpec(name="mlp", arguments={"hidden": [5]}), DATA, seed=3)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y = torch.rand(6, 6, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 2, 1, 0])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum, weight_decay=decay)
    for rows in ([0, 1], [2, 3], [4, 5]):
        optimiser.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
    update = {name: p.detach() - weights[name] for name, p in model.named_parameters()}
    one = build_gradient(model, DATA)
    simulated = build_stepped_gradient(one, training, (2, 2, 2))(weights, x, y)
    together = one(weights, x, y)
    for name, expected in convert_to_gradient(update, weights, training, 3).items():
        torch.testing.assert_close(simulated[name], expected, rtol=1e-4, atol=1e-6)
    if not decay:
        total = {name: -compute_total_step(training, 3) * g for name, g in simulated.items()}
        assert all(torch.allclose(total[name], update[name], atol=1e-6) for name in update)
    assert max(float((together[name] - simulated[name]).abs().max()) for name in update) > 1e-3


def test_one_simulated_step_is_the_gradient() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x, y = torch.rand(4, 6, generator=torch.Generator().manual_seed(4)), torch.tensor([0, 1, 2, 0])
    one = build_gradient(model, DATA)
    found = build_stepped_gradient(one, Training(learning_rate=0.1, batch_size=4, steps=1), (4,))(weights, x, y)
    for name, expected in one(weights, x, y).items():
        torch.testing.assert_close(found[name], expected)


def test_rows_are_assigned_to_batches_by_epoch() -> None:
    assert assign_rows((2, 1, 2, 1), 3) == [[0, 1], [2], [0, 1], [2]]
    assert assign_rows((2, 1, 2, 1), 6) == [[0, 1], [2], [3, 4], [5]]


def test_disagreement_of_epochs_does_not_depend_on_the_order() -> None:
    x = torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    shuffled = torch.cat([x, x[[2, 0, 3, 1]], x.flip(0)])
    assert float(measure_disagreement(shuffled, 3)) == pytest.approx(0, abs=1e-12)
    apart = torch.cat([x, x + 0.5])
    assert float(measure_disagreement(apart, 2)) == pytest.approx(0.25)


def test_examples_of_epochs_are_matched_and_averaged() -> None:
    x = torch.rand(4, 5, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 0, 1, 1])
    both = torch.cat([x, x[[1, 0, 3, 2]] + 0.01])
    merged, labels = merge_epochs(both, y.repeat(2), 2)
    assert torch.equal(labels, y)
    torch.testing.assert_close(merged, x + 0.005)


def test_examples_are_averaged_by_label_and_not_by_distance() -> None:
    x = torch.tensor([[0.0], [1.0]])
    merged, _ = merge_epochs(torch.cat([x, x.flip(0)]), torch.tensor([0, 1, 0, 1]), 2)
    assert merged.flatten().tolist() == [0.5, 0.5]


def test_separate_epochs_need_a_weight_and_several_epochs() -> None:
    assert count_separate_epochs(0.0, Training(learning_rate=1, batch_size=1, epochs=3)) == 1
    assert count_separate_epochs(1.0, Training(learning_rate=1, batch_size=1, epochs=3)) == 3
    assert count_separate_epochs(1.0, Training(learning_rate=1, batch_size=1, steps=3)) == 1
