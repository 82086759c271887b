"""Tests of layer weights against AGIC's equations 6 to 8, computed by hand."""

import pytest
import torch
from observations import make_image_case
from torch import nn

from attacker.attacks import cpl, inverting_gradients
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.layer_weights import MODIFIER_CAP, keep_largest, weigh_by_depth, weigh_relatively
from attacker.attacks.matching.objectives import cosine
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Conv2d(2, 2, 3),
        nn.ReLU(),
        nn.Conv2d(2, 2, 3),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(p) for name, p in model.named_parameters()}


def values(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: round(float(w), 6) for name, w in weights.items()}


def test_weights_rise_linearly_from_one_to_beta_and_linear_layers_get_their_mean() -> None:
    model = network()
    assert values(weigh_by_depth(5.0)(model, full(model))) == {
        "0.weight": 1.0, "0.bias": 1.0, "1.weight": 1.0, "1.bias": 1.0, "3.weight": 3.0, "3.bias": 3.0,
        "5.weight": 5.0, "5.bias": 5.0, "7.weight": 3.0, "7.bias": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 1.5), ("log", 1 + 0.6309298), ("exp", 1 + 0.2689414), ("constant", 1.0)]
)
def test_every_shape_starts_at_one_and_ends_at_beta(shape: str, middle: float) -> None:
    """Table I: a f(i) + b through (1, 1) and (3, 2); half way, log 2 / log 3 and (e^2 - e) / (e^3 - e) of the way."""
    model = network()
    found = values(weigh_by_depth(2.0, shape)(model, full(model)))
    assert (found["0.weight"], found["5.weight"]) == (1.0, 1.0 if shape == "constant" else 2.0)
    assert found["3.weight"] == pytest.approx(middle, abs=1e-5)


def test_beta_below_one_gives_falling_weights() -> None:
    model = network()
    assert [values(weigh_by_depth(0.5)(model, full(model)))[f"{i}.weight"] for i in (0, 3, 5)] == [1.0, 0.75, 0.5]


def test_share_of_zeros_raises_the_weight_up_to_a_cap() -> None:
    model = network()
    observed = full(model)
    observed["3.weight"].flatten()[:9] = 0  # a quarter of 36
    observed["5.weight"].zero_()
    found = values(weigh_by_depth(5.0)(model, observed))
    assert found["3.weight"] == pytest.approx(3 / 0.75)
    assert found["3.bias"] == pytest.approx(3 / 0.75)
    assert found["5.weight"] == pytest.approx(5 * MODIFIER_CAP)
    assert found["7.weight"] == 3.0
    assert values(weigh_by_depth(5.0, relu_modifier=False)(model, observed))["3.weight"] == 3.0


def test_without_convolutions_all_layers_have_weight_one() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert set(values(weigh_by_depth(50.0)(model, full(model))).values()) == {1.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((0.0,), "beta must be positive"), ((2.0, "cubic"), "argument shape, which says how layer weights depend on depth")],
)
def test_invalid_arguments_are_refused(arguments, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        weigh_by_depth(*arguments)


def test_weights_are_applied_in_the_dot_product_and_both_norms() -> None:
    """The reference computes equation 6 independently."""
    case, x, y = make_image_case(1)
    weigh = weigh_by_depth(7.0)
    attack = cpl().copy_with(distance=cosine, layers=weigh)
    search = CaseBatch(attack, [case])
    guess = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    model = models.build(case.observations[0].model, case.observations[0].data)
    weights = {name: w.clone().requires_grad_() for name, w in case.observations[0].weights.items()}
    loss = nn.functional.cross_entropy(torch.func.functional_call(model, weights, (guess,)), y)
    mine = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    seen = {name: -u / 0.1 for name, u in case.observations[0].update.items()}
    alpha = weigh(model, seen)
    dot, own, other = (
        sum(float(alpha[name] * (a[name] * b[name]).sum()) for name in seen)
        for a, b in ((mine, seen), (mine, mine), (seen, seen))
    )
    problem = {"labels": y[None], "gain": torch.ones(1), "views": {"0": search.views[0].rows}}
    slope, found = search.evaluate(guess.flatten()[None], problem)
    assert float(found) == pytest.approx(1 - dot / (own * other) ** 0.5, abs=1e-5)
    assert slope.abs().sum() > 0


def test_shortcut_convolutions_of_a_residual_network_are_counted() -> None:
    """ResNet20-4 has 21 convolutions: the first, 18 in blocks, and two shortcuts that change the shape (AGIC, table I)."""
    model = models.build_layout(ModelSpec(name="resnet20_4"), DataSpec(shape=(3, 32, 32), num_classes=10))
    found = values(
        weigh_by_depth(21.0, relu_modifier=False)(model, {name: torch.ones(1) for name, _ in model.named_parameters()})
    )
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    assert [found[f"{name}.weight"] for name in convolutions] == [float(i) for i in range(1, 22)]
    (head,) = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert found[f"{head}.weight"] == 11.0


def test_relative_weights_by_hand() -> None:
    """The tensors' mean squares are 16 and 2; a tensor of zeros gets a tiny share (1e-8) of the mean square of all values."""
    observed = {"b": torch.tensor(4.0), "w": torch.tensor([0.0, -2.0]), "none": torch.zeros(1)}
    assert {name: float(w) for name, w in weigh_relatively(observed).items()} == {
        "b": pytest.approx(1 / (4 * 16)),
        "w": pytest.approx(1 / (4 * 2)),
        "none": pytest.approx(1 / (4 * 1e-8 * 20 / 4)),
    }


@pytest.mark.parametrize(("defense", "worst"), [("", 1.0), ("clip(0.01)", 1.0)])
def test_relative_distance_of_a_zero_gradient_is_one(defense: str, worst: float) -> None:
    case, _, _ = make_image_case(1, **({"defense": defense} if defense else {}))
    assert CaseBatch(cpl(relative=True), [case]).views[0].worst.item() == pytest.approx(worst, rel=1e-5)


def test_relative_weights_are_not_used_with_known_noise() -> None:
    """Noise has equal power in all tensors, so that relative weights would raise tensors that are mostly noise."""
    case, _, _ = make_image_case(1, defense="gaussian(0.002)")
    known, plain = (CaseBatch(cpl(relative=one), [case]).views[0].worst for one in (True, False))
    assert torch.equal(known, plain)
    ignored = CaseBatch(cpl(relative=True, knows_defense=False), [case]).views[0].worst
    assert ignored.item() == pytest.approx(1, rel=1e-5)


def test_the_largest_entries_of_each_tensor_are_kept() -> None:
    observed = {"w": torch.tensor([[0.1, -5.0], [2.0, 0.0], [3.0, -1.0]]), "b": torch.tensor([1.0, 1.0, -4.0])}
    found = keep_largest(0.5)(nn.Identity(), observed)
    assert found["w"].tolist() == [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    assert found["b"].tolist() == [1.0, 1.0, 1.0]  # two of three, and one that is as large
    assert keep_largest(1e-9)(nn.Identity(), observed)["w"].sum() == 1
    assert all(bool((mask == 1).all()) for mask in keep_largest(1.0)(nn.Identity(), observed).values())
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"got {share}"):
            keep_largest(share)


def test_only_kept_entries_are_compared() -> None:
    """The reference computes the cosine of the kept entries from a gradient of its own, for two cases with other masks."""
    cases, _, labels = zip(*(make_image_case(i) for i in (1, 2)), strict=True)
    search = CaseBatch(inverting_gradients(compared_share=0.2, tv=0.0), cases)
    guess = torch.rand(2, *search.data.shape, generator=torch.Generator().manual_seed(1))
    problem = {"labels": torch.stack(labels), "gain": torch.ones(2), "views": {"0": search.views[0].rows}}
    _, found = search.evaluate(guess.flatten(1), problem)
    for i, case in enumerate(cases):
        (seen,) = case.observations
        model = models.build(seen.model, seen.data)
        weights = {name: w.clone().requires_grad_() for name, w in seen.weights.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(model, weights, (guess[i : i + 1],)), labels[i])
        ours, theirs = [], []
        for name, g in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            observed = -seen.update[name] / 0.1
            kept = observed.abs().flatten().topk(max(1, -(-observed.numel() // 5))).indices
            ours.append(g.flatten()[kept])
            theirs.append(observed.flatten()[kept])
        expected = 1 - torch.cosine_similarity(torch.cat(ours), torch.cat(theirs), dim=0)
        assert float(found[i]) == pytest.approx(float(expected), abs=1e-5)
    assert search.views[0].is_partial
    assert search.views[0].coordinates == sum(-(-w.numel() // 5) for w in cases[0].observations[0].weights.values())


def test_power_of_known_noise_is_that_of_the_kept_entries() -> None:
    case, _, _ = make_image_case(1, defense="gaussian(0.002)")
    whole, part = (CaseBatch(inverting_gradients(compared_share=share), [case]).views[0] for share in (1.0, 0.2))
    assert float(part.power) == pytest.approx(float(whole.power) * part.coordinates / whole.coordinates, rel=1e-5)


def test_confidence_is_undecided_for_a_part_of_the_gradient() -> None:
    case, _, _ = make_image_case(1)
    (found,) = inverting_gradients(compared_share=0.5, gradient_penalty=0.5, steps=3)(
        [case], rng=torch.Generator().manual_seed(0)
    )
    assert any("part of the gradient's entries" in note for note in found.notes)
    assert found.evaluations == 6
