"""Tests of updates by Adam or RMSprop that are stated as SGD: they may have rank one, but hold no values of the example."""

import pytest
import torch
from generators import seeded
from observations import make_observation
from torch import nn

from attacker.attacks import Case, exact
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training


@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.SGD])
@pytest.mark.parametrize(("examples", "steps"), [(1, 1), (4, 1), (4, 2)])
def test_signs_of_gradients_are_not_taken_for_examples(optimiser: type[torch.optim.Optimizer], examples: int, steps: int) -> None:
    """After several steps, rows of neurons that were active in one step alone are signs, and parallel for positive inputs."""
    data, spec = DataSpec(shape=(1, 8, 8), num_classes=10), ModelSpec(name="mlp", arguments={"hidden": [128]})
    model = models.build(spec, data, seed=0)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y = torch.rand(examples, 1, 8, 8, generator=seeded(1)), torch.arange(examples)
    taken = optimiser(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    for images, labels in zip(x.chunk(steps), y.chunk(steps), strict=True):
        taken.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        taken.step()
    update = {name: p.detach() - weights[name] for name, p in model.named_parameters()}
    training = Training(learning_rate=0.01, batch_size=examples // steps, steps=steps)
    observation = make_observation(update, weights, model=spec, data=data, training=training)
    attack = exact(fallback="none")
    if optimiser is torch.optim.SGD:
        (found,) = attack([Case((observation,))], rng=seeded())
        assert len(found.x) == examples
        return
    with pytest.raises(ValueError, match="about one magnitude"):
        attack([Case((observation,))], rng=seeded())
