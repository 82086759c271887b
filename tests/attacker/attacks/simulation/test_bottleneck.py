"""Tests of the gradient before a variational bottleneck with solved errors, against clients that drew their own values."""

from dataclasses import replace

import pytest
import torch
from generators import seed_default
from observations import observe_steps
from torch import Tensor
from torch.func import grad

from attacker.attacks import Case, rog
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.simulation import bottleneck, gradients
from attacker.attacks.simulation.bottleneck import SolvedBottleneck, find_solved_bottleneck
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(3, 16, 16), num_classes=5)
MODEL = ModelSpec(name="lenet_rog", network="precode(bottleneck=16)")
LABELS = torch.tensor([0, 3, 1])

pytestmark = pytest.mark.usefixtures("one_thread")


def draw_images(seed: int = 0) -> Tensor:
    return torch.rand(3, *DATA.shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def case() -> Case:
    with seed_default(7):  # the client's draws
        return Case((observe_steps((draw_images(), LABELS), model=MODEL, data=DATA),), known_labels=LABELS)


def compare(case: Case, x: Tensor) -> tuple[SolvedBottleneck, dict[str, float]]:
    """Return the bottleneck that a search uses, and the relative error of each simulated gradient at examples x."""
    (view,) = CaseBatch(rog(decoder="pixels"), [case]).views
    assert view.bottleneck is not None
    row, z = view.get_case(0), torch.zeros(1)
    made = view.simulate(row, x, LABELS, z)
    return view.bottleneck, {name: float((made[name] - g).norm() / g.norm()) for name, g in row["observed"].items()}


def test_true_examples_explain_the_update_whatever_was_drawn(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hardly any weight of mean draws, the errors and so all gradients before the block are exact; others are not."""
    monkeypatch.setattr(bottleneck, "RIDGE", 1e-7)
    found, errors = compare(case, draw_images())
    assert max(errors.values()) < 1e-2
    _, others = compare(case, draw_images(seed=1))
    assert min(others[name] for name in found.before) > 0.1


def test_errors_of_mean_draws_are_those_of_autograd_and_a_large_weight_leaves_them(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bottleneck, "RIDGE", 1e7)
    found, _ = compare(case, draw_images())
    (one,) = case.observations
    model = models.build(MODEL, DATA).eval()

    def measure(weights: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(model, weights, (draw_images(),))
        block = model.get_submodule(found.encoder.rpartition(".")[0])
        penalty = block.penalty
        assert isinstance(penalty, Tensor)
        block.penalty = None
        return torch.nn.functional.cross_entropy(logits, LABELS) + penalty

    wanted = grad(measure)(dict(one.weights))
    observed = {name: torch.randn_like(one.weights[name]) for name in found.names}
    made = found(one.weights, draw_images(), LABELS, observed)
    for name in found.compared:
        torch.testing.assert_close(made[name], wanted[name], atol=1e-4, rtol=1e-2)


def test_variances_of_errors_are_those_over_the_draws_of_the_client(case: Case) -> None:
    """The errors of the means hardly vary in an untrained network, those of the deviations have the mean that is expected."""
    (one,) = case.observations
    found, _ = compare(case, draw_images())
    model, drawn = models.build(MODEL, DATA), []
    model.load_state_dict(dict(one.weights), strict=False)
    block = model.get_submodule(found.encoder.rpartition(".")[0])
    outputs: list[Tensor] = []
    model.get_submodule(found.encoder).register_forward_hook(lambda module, args, out: outputs.append(out))
    for seed in range(300):
        torch.manual_seed(seed)
        loss = torch.nn.functional.cross_entropy(model.train()(draw_images()), LABELS) + block.penalty
        drawn.append(torch.autograd.grad(loss, outputs[-1])[0])
    means, deviations = torch.stack(drawn).chunk(2, dim=2)
    expected, ratio = found._compute_expected_errors(dict(one.weights), draw_images(), LABELS, outputs[-1])
    assert (means.mean(dim=0) - expected.chunk(2, dim=1)[0]).norm() < 0.1 * expected.norm()
    exact = float(deviations.var(dim=0).mean() / means.var(dim=0).mean())
    assert exact > 20
    assert 0.4 * exact < float(ratio) < 2.5 * exact  # estimated from one draw


def test_errors_are_nearer_to_the_expected_ones_where_these_vary_less() -> None:
    """One example with one input: the solution is a mean of the observed and the expected error, weighted by hand."""
    rows, observed, expected = torch.tensor([[2.0]]), torch.tensor([[2.0], [2.0]]), torch.tensor([[3.0, 3.0]])
    ridge = bottleneck.RIDGE * 4.0
    solved = bottleneck._solve_errors(rows, observed, expected, torch.tensor(10.0))
    assert solved[0, 0] == pytest.approx((4.0 + 10 * ridge * 3.0) / (4.0 + 10 * ridge))
    assert solved[0, 1] == pytest.approx((4.0 + ridge * 3.0) / (4.0 + ridge))


def test_surrogate_weights_are_those_between_the_sent_and_the_returned_ones(case: Case) -> None:
    (one,) = case.observations
    one = replace(one, training=replace(one.training, steps=2))
    half = {name: w + 0.5 * one.update[name] for name, w in one.weights.items()}
    (view,), (middle,) = (
        CaseBatch(rog(decoder="pixels", surrogate=chosen), [replace(case, observations=(replace(one, weights=start),))]).views
        for chosen, start in ((True, one.weights), (False, half))
    )
    found, expected = (each.simulate(each.get_case(0), draw_images(1), LABELS, torch.zeros(1)) for each in (view, middle))
    assert view.bottleneck is not None
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_only_the_encoder_and_what_precedes_it_are_compared(case: Case) -> None:
    (view,) = CaseBatch(rog(), [case]).views
    found = view.bottleneck
    assert found.encoder.endswith("bottleneck.encoder")
    later = set(view.weights) - found.compared
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in later} == {"decoder", "head"}
    assert set(view.rows["observed"]) == found.compared
    loss = [float(compare(case, draw_images(seed))[1]["0.weight"]) for seed in (0, 1)]
    assert loss[0] < loss[1]


def test_errors_are_also_solved_in_networks_that_are_too_large_for_vmap(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "MAX_VMAP_WEIGHTS", 1)
    monkeypatch.setattr(bottleneck, "RIDGE", 1e-7)
    _, errors = compare(case, draw_images())
    assert max(errors.values()) < 1e-2


def test_large_batches_other_networks_and_defended_updates_are_simulated_as_before() -> None:
    model = models.build(MODEL, DATA)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    assert find_solved_bottleneck(model, DATA, weights, 16, "cross_entropy") is not None
    assert find_solved_bottleneck(model, DATA, weights, 17, "cross_entropy") is None
    plain = models.build(ModelSpec(name="lenet_rog"), DATA)
    own = {name: p.detach() for name, p in plain.named_parameters()}
    assert find_solved_bottleneck(plain, DATA, own, 3, "cross_entropy") is None
    batch = draw_images(), LABELS
    signs = Case((observe_steps(batch, model=MODEL, data=DATA, defense="sign()"),))
    assert CaseBatch(rog(), [signs]).views[0].bottleneck is None
    sent = Case((observe_steps(batch, model=MODEL, data=DATA),))
    assert CaseBatch(rog(knows_defense=False), [sent]).views[0].bottleneck is None
