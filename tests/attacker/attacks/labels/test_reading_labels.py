"""Tests of the evidence that label rules get from an observation."""

from dataclasses import replace

import pytest
import torch
from observations import observe_steps
from torch import Tensor

from attacker.attacks import Case, dlg
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.observed import read_labels
from attacker.attacks.labels.rules import Evidence, infer_labels
from attacker.attacks.simulation.client import build_network
from fedsim.recording import DataSpec, ModelSpec, Observation

DATA = DataSpec(shape=(6,), num_classes=3)
MODEL = ModelSpec(name="mlp", arguments={"hidden": [5]})


def read_evidence(observation: Observation) -> Evidence:
    seen: list[Evidence] = []

    def rule(evidence: Evidence) -> Tensor:
        seen.append(evidence)
        return torch.zeros(evidence.examples, dtype=torch.long)

    dlg(steps=1).copy_with(rule=rule)([Case((observation,))], rng=torch.Generator().manual_seed(0))
    return seen[0]


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [(torch.rand(2, 6, generator=rng), torch.randint(3, (2,), generator=rng)) for _ in range(steps)]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_head_is_halfway_between_first_and_last_local_step(steps: int) -> None:
    observation = observe_steps(*batches(steps), model=MODEL, data=DATA, learning_rate=0.5)
    evidence = read_evidence(observation)
    middle = observation.weights[evidence.weight] + (steps - 1) / (2 * steps) * observation.update[evidence.weight]
    torch.testing.assert_close(evidence.head.weight, middle)
    assert evidence.examples == 2 * steps
    assert evidence.head.features.shape[1] == 5
    torch.testing.assert_close(
        evidence.guess, (evidence.head.features @ evidence.head.weight.T + evidence.head.bias).softmax(dim=1).mean(dim=0)
    )


def test_head_of_a_defended_update_is_the_broadcast_one() -> None:
    observation = observe_steps(*batches(3), model=MODEL, data=DATA, defense="gaussian(0.1)")
    evidence = read_evidence(observation)
    assert evidence.shortened
    assert torch.equal(evidence.head.weight, observation.weights[evidence.weight])


@pytest.mark.parametrize("defense", ["gradient_dropout(0.5)", "random_k(0.2)", "top_k(0.2)"])
def test_labels_are_read_although_entries_of_the_bias_were_not_sent(defense: str) -> None:
    """They are estimated from the entries of the rows that were sent; without, 9 to 13 of 60 labels are missed."""
    data, rng = DataSpec(shape=(1, 8, 8), num_classes=10), torch.Generator().manual_seed(2)
    model = ModelSpec(name="mlp", arguments={"hidden": [64]})
    right = total = 0
    for seed in range(5):
        labels = torch.randint(10, (12,), generator=rng)
        observation = observe_steps(
            (torch.rand(12, 1, 8, 8, generator=rng), labels), model=model, data=data, defense=defense, seed=seed
        )
        network = build_network(observation)
        seen = ObservedGradients([observation], model=network, device="cpu")
        found = read_labels(infer_labels, seen, 0, network, torch.Generator().manual_seed(0))
        total += len(labels)
        right += int(torch.minimum(found.bincount(minlength=10), labels.bincount(minlength=10)).sum())
    assert right / total >= 0.9


@pytest.mark.parametrize("classes", [10, 600])
@pytest.mark.parametrize("steps", [1, 2])
def test_labels_are_read_behind_precode_although_the_head_has_no_bias(classes: int, steps: int) -> None:
    """They follow from the gradient of the decoder's bias. The head has 512 inputs, fewer than 600 classes."""
    model, data = ModelSpec(name="lenet_rog", network="precode()"), DataSpec(shape=(1, 8, 8), num_classes=classes)
    right = 0
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        batch = torch.rand(4, *data.shape, generator=rng), torch.randint(classes, (4,), generator=rng)
        seen = observe_steps(*[batch] * steps, model=model, data=data, learning_rate=0.01, seed=seed)
        seen = replace(seen, num_examples=4, training=replace(seen.training, steps=None, epochs=steps))
        observed = ObservedGradients([seen], model=build_network(seen), device="cpu")
        inferred = read_labels(infer_labels, observed, 0, observed.model, rng)
        right += sum(min(inferred.tolist().count(c), batch[1].tolist().count(c)) for c in set(inferred.tolist()))
    assert right == 16


@pytest.mark.parametrize("count", [3, 6])
@pytest.mark.parametrize("defense", ["sign()", "top_k(0.2)", "qsgd(3)", "rog_uniform(3)", "clip(0.1)"])
def test_labels_are_read_behind_defenses_although_the_head_has_no_bias(defense: str, count: int) -> None:
    """They follow from the sums of the head's rows, since features are not negative."""
    model, data = ModelSpec(name="lenet_rog"), DataSpec(shape=(1, 8, 8), num_classes=4)
    right = 0
    for seed in range(8):
        x = torch.rand(count, *data.shape, generator=torch.Generator().manual_seed(seed))
        y = torch.tensor([0, 1, 1, 3, 3, 3])[:count]
        seen = observe_steps((x, y), model=model, data=data, defense=defense, seed=seed)
        observed = ObservedGradients([seen], model=build_network(seen), device="cpu")
        inferred = read_labels(infer_labels, observed, 0, observed.model, torch.Generator().manual_seed(seed)).tolist()
        right += sum(min(inferred.count(c), y.tolist().count(c)) for c in range(4))
    assert right >= 0.9 * 8 * count


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_useless_gradients_behind_precode_still_give_labels(value: float) -> None:
    model, data = ModelSpec(name="lenet_rog", network="precode()"), DataSpec(shape=(1, 8, 8), num_classes=600)
    batch = torch.rand(4, *data.shape, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3, 4])
    seen = observe_steps(batch, model=model, data=data)
    observed = ObservedGradients([seen], model=build_network(seen), device="cpu")
    (name,) = (name for name in observed.gradients if name.endswith("decoder.bias"))
    observed.gradients[name].fill_(value)
    assert len(read_labels(infer_labels, observed, 0, observed.model, torch.Generator().manual_seed(0))) == 4
