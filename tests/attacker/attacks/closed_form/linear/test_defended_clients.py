"""Tests of closed forms behind defenses and other optimisers: wrong answers are not likely, and what is left stays certain.

Updates by Adam or RMSprop that are stated as SGD may have rank one, but hold no values of the example.
"""

from dataclasses import replace

import pytest
import torch
from generators import seeded
from linear_batches import DATA, batch, network
from observations import make_observation
from torch import Tensor, nn
from torch.nn import functional

import fedleak
from attacker.attacks import Case, exact
from attacker.attacks.closed_form.observations import observe
from attacker.attacks.simulation.local_steps import clip_gradient
from attacker.reconstruction import MAX_RECOVERED_MSE, Reconstruction
from defenses import DefenseSpec
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training


def compute_update(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    gradient = torch.autograd.grad(functional.cross_entropy(model(DATA.normalise(x)), y), list(model.parameters()))
    return {name: -g for name, g in zip(dict(model.named_parameters()), gradient, strict=True)}


def watch(model: nn.Module, update: dict[str, Tensor], defense: str = "", *, examples: int = 1) -> Observation:
    built = DefenseSpec.parse(defense).build()
    sent, _ = built.apply(update, built.init(update), torch.Generator().manual_seed(1))
    gradient = {name: -u for name, u in sent.items()}
    settings = {"mean": DATA.mean, "std": DATA.std, "num_examples": examples, "defense": defense}
    return fedleak.observe(model, "cross_entropy", gradient, shape=DATA.shape, **settings)


def attack(observation: Observation) -> Reconstruction:
    return fedleak.attack(observation, "exact", fallback="none").reconstructions[0]


def measure_errors(found: Reconstruction, x: Tensor) -> Tensor:
    """Return the mean squared error of each answer to its nearest original, (N,)."""
    return (found.x.nan_to_num().clamp(0, 1)[:, None] - x[None]).square().flatten(2).mean(dim=2).amin(dim=1)


@pytest.mark.parametrize(
    ("defense", "examples"),
    [("sign()", 1), ("sign()", 4), ("random_k(0.1)", 1), ("top_k(0.02)", 1), ("clip(0.5) | gaussian(0.01)", 1)],
)
def test_wrong_answers_behind_defenses_are_not_likely(defense: str, examples: int) -> None:
    """Signs, a few entries of an update, and noise fit many images."""
    for seed in range(4):
        x, y = batch(examples, seed)
        model = network((64,), seed=seed)
        found = attack(watch(model, compute_update(model, x, y), defense, examples=examples))
        errors = measure_errors(found, x)
        assert float(errors.max()) > MAX_RECOVERED_MSE
        assert not bool(((found.confidence >= 0.5) & (errors > MAX_RECOVERED_MSE)).any())


@pytest.mark.parametrize("defense", ["clip(0.5)", "top_k(0.5)", "gaussian(0.0001)"])
def test_what_a_defense_leaves_stays_certain(defense: str) -> None:
    x, y = batch(1, 5)
    model = network((64,))
    found = attack(watch(model, compute_update(model, x, y), defense))
    assert float(measure_errors(found, x)) < 1e-3
    assert float(found.confidence) > 0.9


@pytest.mark.parametrize("examples", [1, 4])
def test_clipping_of_the_gradient_is_simulated_by_the_check(examples: int) -> None:
    x, y = batch(examples, 5)
    model = network((64,))
    update = compute_update(model, x, y)
    seen = watch(model, clip_gradient(update, 0.01), examples=examples)
    clipped = replace(seen, training=replace(seen.training, clip_norm=0.01))
    found = attack(clipped)
    assert float(measure_errors(found, x).max()) < 1e-8
    assert float(found.explained.min()) > 1 - 1e-6
    assert any("another loss or learning rate" in note for note in attack(seen).notes)  # the update is a hundredth of the stated


def test_paler_copies_have_the_given_distance_and_the_same_signs() -> None:
    x, y = batch(3)
    model = network((16,))
    seen = observe([Case((watch(model, compute_update(model, x, y), examples=3),))])
    paler = seen.make_paler(x, 0.009)
    assert (paler - x).square().flatten(1).mean(dim=1).tolist() == pytest.approx([0.009] * 3)
    assert bool((DATA.normalise(paler) * DATA.normalise(x.double()) >= 0).all())


@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.SGD])
@pytest.mark.parametrize(("examples", "steps"), [(1, 1), (4, 1), (4, 2)])
def test_signs_of_gradients_are_not_taken_for_examples(optimiser: type[torch.optim.Optimizer], examples: int, steps: int) -> None:
    """After several steps, rows of neurons that were active in one step alone are signs, and parallel for positive inputs."""
    data, spec = DataSpec(shape=(1, 8, 8), num_classes=10), ModelSpec(name="mlp", arguments={"hidden": [128]})
    model = models.build(spec, data, seed=0)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y = torch.rand(examples, 1, 8, 8, generator=seeded(1)), torch.arange(examples)
    taken = optimiser(model.parameters(), lr=0.01)
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
