"""Tests of the route `linear` on clients that train otherwise than stated: no mixture is certain, and no exact answer is lost."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from generators import seed_default
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import fedleak
from attacker.attacks.closed_form.linear.first_layer import recover_linear
from attacker.attacks.networks.chain import read_chain
from attacker.reconstruction import Reconstruction
from fedsim.recording import Observation

MAX_RECOVERED = 0.009
Loss = Callable[[Tensor, Tensor], Tensor]


def load(*indices: int) -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.from_numpy(digits.images[list(indices)]).float()[:, None] / 16, torch.from_numpy(digits.target[list(indices)])


def network(*outputs: int, activation: Callable[[], nn.Module] = nn.ReLU, first: Sequence[nn.Module] = ()) -> nn.Module:
    """Return a network for 8x8 images, of linear layers with these numbers of outputs. first: modules before the first layer."""
    with seed_default(3):
        layers: list[nn.Module] = [nn.Flatten(), *first]
        for given, width in zip((64, *outputs), outputs, strict=False):
            layers += [nn.Linear(given, width), activation()]
    return nn.Sequential(*layers[:-1])


def watch(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, *, examples: int, stated: str = "cross_entropy") -> Observation:
    """Return the observation of one step on the inputs x with a loss, with the number of examples and the loss as stated."""
    with seed_default(0):
        gradient = torch.autograd.grad(loss(model(x), y), list(model.parameters()))
    return fedleak.observe(model, stated, gradient, shape=(1, 8, 8), num_examples=examples)


def attack(observation: Observation, **arguments: object) -> Reconstruction:
    return fedleak.attack(observation, "exact", **{"fallback": "none", **arguments}).reconstructions[0]


def binary(logits: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits[:, 0], y.float())


@pytest.mark.parametrize(
    ("model", "loss", "stated", "labels"),
    [
        (network(1), binary, "logistic", (0, 1, 1, 0)),
        (network(1), binary, "logistic", (1, 1, 1, 1)),
        (network(2), functional.cross_entropy, "cross_entropy", (0, 1, 1, 0)),
        (network(2), functional.cross_entropy, "cross_entropy", (1, 1, 1, 1)),
    ],
)
def test_rank_one_of_a_narrow_network_is_not_one_example(
    model: nn.Module, loss: Loss, stated: str, labels: Sequence[int]
) -> None:
    """All gradients of a layer with one or two outputs have rank one, so that a batch gives a mixture."""
    x, _ = load(3, 14, 15, 92)
    with pytest.raises(ValueError, match="any answer would be a mixture"):
        attack(watch(model, x, torch.tensor(labels), loss, examples=4, stated=stated), route="linear")
    one = attack(watch(model, x[:1], torch.tensor(labels[:1]), loss, examples=1, stated=stated), route="linear")
    assert float((one.x - x[:1]).square().mean()) < 1e-8
    assert float(one.confidence) > 0.9


def test_rank_one_of_equal_errors_is_not_one_example() -> None:
    """In an untrained linear model of ten classes, the errors of all examples with one label are equal."""
    model = network(10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    x, _ = load(3, 14, 15)
    with pytest.raises(ValueError, match="any answer would be a mixture"):
        attack(watch(model, x, torch.tensor([5, 5, 5]), functional.cross_entropy, examples=3), route="linear")


def test_copies_behind_sigmoid_are_one_example() -> None:
    """Behind a smooth activation, rank one shows that the examples are equal, also with a single logit."""
    model, (x, _) = network(32, 1, activation=nn.Sigmoid), load(3, 3)
    found = attack(watch(model, x, torch.tensor([1, 1]), binary, examples=2, stated="logistic"), route="linear")
    assert float((found.x - x).square().mean()) < 1e-8


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_more_examples_than_reported_are_not_certain(activation: type[nn.Module]) -> None:
    x, _ = load(3, 14, 15, 92)
    found = attack(watch(network(64, 10, activation=activation), x, torch.full((4,), 7), functional.cross_entropy, examples=1))
    assert float((found.x - x).square().flatten(1).mean(dim=1).min()) > MAX_RECOVERED
    assert not float(found.confidence) >= 0.5
    assert any("more examples are behind" in note for note in found.notes)


@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_signs_from_adam_are_not_certain(optimiser: Literal["adam", "adamw"]) -> None:
    """The quotients of an update of Adam are an image of two levels, which has rank one and the values 0 and 1."""
    (x, y), model = load(3), network(32, 10, activation=nn.Sigmoid)
    gradient = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    signs = [g / (g.abs() + 1e-8) for g in gradient]  # the first step of Adam, divided by its rate
    observation = fedleak.observe(model, "cross_entropy", signs, shape=(1, 8, 8))
    training = replace(observation.training, optimiser=optimiser)
    found = attack(replace(observation, training=training))
    assert float((found.x - x).square().mean()) > MAX_RECOVERED
    assert not float(found.confidence) >= 0.5
    assert any("adam" in note for note in found.notes)


def test_one_logit_and_one_reported_example_need_a_gradient_that_fits() -> None:
    x, _ = load(3, 14)
    found = attack(watch(network(1), x, torch.tensor([1, 1]), binary, examples=1, stated="logistic"), route="linear")
    assert not float(found.confidence) >= 0.5
    assert any("mixture of several examples" in note for note in found.notes)


def test_dropped_inputs_are_not_certain() -> None:
    x, y = load(3)
    model = network(64, 10, first=(nn.Dropout(0.5),)).train()
    found = attack(watch(model, x, y, functional.cross_entropy, examples=1), route="linear")
    assert float((found.x - x).square().mean()) > MAX_RECOVERED
    assert found.confidence.isnan().all()
    assert any("dropout of inputs" in note for note in found.notes)
    kept = attack(watch(model.eval(), x, y, functional.cross_entropy, examples=1), route="linear")
    assert float(kept.confidence) > 0.9


def test_unstated_normalisation_is_named_instead_of_certain() -> None:
    x, y = load(3, 14)
    model = network(128, 10)
    found = attack(watch(model, (x - 0.3) / 0.2, y, functional.cross_entropy, examples=2), route="linear")
    assert found.confidence.isnan().all()
    assert any("set mean and std" in note for note in found.notes)
    stated = fedleak.observe(
        model,
        "cross_entropy",
        torch.autograd.grad(functional.cross_entropy(model((x - 0.3) / 0.2), y), list(model.parameters())),
        shape=(1, 8, 8),
        num_examples=2,
        mean=(0.3,),
        std=(0.2,),
    )
    assert float(attack(stated, route="linear").confidence.min()) > 0.9


def compute_focal_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean of (1 - p)^2 times the cross-entropy of each example, where p is the probability of its label."""
    own = functional.cross_entropy(logits, y, reduction="none")
    return ((1 - (-own).exp()).square() * own).mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, y: functional.cross_entropy(logits, y, label_smoothing=0.2),
        lambda logits, y: 0.02 * functional.cross_entropy(logits, y),
        lambda logits, y: 40 * functional.cross_entropy(logits, y),
        compute_focal_loss,
    ],
    ids=["label smoothing", "smaller rate", "larger rate", "focal"],
)
@pytest.mark.parametrize("examples", [(3,), (3, 14, 15)])
def test_another_loss_or_rate_loses_neither_examples_nor_labels(loss: Loss, examples: Sequence[int]) -> None:
    """The first layer's gradient gives the examples whatever the scale; no route or search replaces them by a worse answer."""
    x, y = load(*examples)
    found = attack(watch(network(128, 10), x, y, loss, examples=len(x)), fallback="cpl", steps=3)
    distance = (found.x[:, None] - x[None]).square().flatten(2).mean(dim=2)
    match = distance.argmin(dim=0)
    assert found.route == "linear"
    assert sorted(match.tolist()) == list(range(len(x)))
    assert float(distance.amin(dim=0).max()) < 1e-8
    assert found.y[match].tolist() == y.tolist()
    assert float(found.confidence.min()) > 0.9


def test_frozen_first_layer_is_not_likely() -> None:
    x, y = load(3)
    model = network(64, 10)
    seen = watch(model, x, y, functional.cross_entropy, examples=1)
    gradient = {name: -u if name not in ("1.weight", "1.bias") else torch.zeros_like(u) for name, u in seen.update.items()}
    found = attack(fedleak.observe(model, "cross_entropy", gradient, shape=(1, 8, 8)), route="layers")
    assert not float(found.confidence) >= 0.5


def test_the_single_answer_of_a_wide_network_is_not_ambiguous() -> None:
    x, y = load(3)
    seen = watch(network(32, 10), x, y, functional.cross_entropy, examples=1)
    weights = {name: w.double() for name, w in seen.weights.items()}
    gradient = {name: -u.double() for name, u in seen.update.items()}
    own = torch.Generator().manual_seed(0)
    assert not recover_linear(read_chain(network(32, 10), (1, 8, 8)), weights, gradient, 1, own).ambiguous


@pytest.mark.parametrize("pasted", [False, True], ids=["MixUp", "CutMix"])
def test_mixed_inputs_with_mixed_labels_are_not_certain(pasted: bool) -> None:
    """The inputs are exact, but none is an example. The same inputs with single labels cannot be told from examples."""
    (x, _), share, model = load(3, 14), 0.3, network(64, 10)
    top = torch.arange(8) < 8 * share
    x = torch.where(top[:, None], x, x.flip(0)) if pasted else share * x + (1 - share) * x.flip(0)
    soft = torch.tensor([[share, 1 - share], [1 - share, share]])
    y = torch.zeros(2, 10).index_copy(1, torch.tensor([3, 7]), soft)
    mixed = attack(watch(model, x, y, functional.cross_entropy, examples=2))
    assert float((mixed.x[:, None] - x).square().mean(dim=(2, 3, 4)).amin(dim=1).max()) < 1e-8
    assert mixed.confidence.isnan().all()
    assert any("two labels at once" in note for note in mixed.notes)
    single = attack(watch(model, x, torch.tensor([7, 3]), functional.cross_entropy, examples=2))
    assert float(single.confidence.min()) > 0.9
