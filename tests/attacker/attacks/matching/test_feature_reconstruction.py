"""Tests of feature reconstruction: the Gaussian layer, the spans in which features should be, needs, oracles and the null."""

from collections.abc import Callable

import pytest
import torch
from observations import observe_steps
from torch import Generator, Tensor, nn

from attacker.attacks import AttackSpec, Case, feature_reconstruction, find_unmet, inverting_gradients
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.probes import compute_head_inputs
from attacker.attacks.learned.deep_prior import CODES, DeepPrior
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.feature_matching import (
    can_match_spans,
    measure_span_mismatch,
    recover_case_features,
    recover_spans,
)
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.layer_weights import weigh_by_norm
from attacker.attacks.matching.priors import NEIGHBOUR_CONTRAST
from attacker.attacks.needs import list_oracles
from attacker.attacks.networks.gaussian_layer import find_gaussian_layer, find_wide_layer
from attacker.attacks.simulation.client import build_network
from fedsim import models
from fedsim.models.network_warnings import WIDE_HEAD_WARNING
from fedsim.recording import DataSpec, ModelSpec, Training

DATA = DataSpec(shape=(1, 8, 8), num_classes=6)
WIDE = ModelSpec(name="wide_head", arguments={"base": "mlp", "features": 16, "neurons": 4096})


def make_case(labels: list[int], model: ModelSpec = WIDE) -> tuple[Case, Tensor, Tensor]:
    x = torch.rand(len(labels), *DATA.shape, generator=Generator().manual_seed(0))
    y = torch.tensor(labels)
    return Case((observe_steps((x, y), model=model, data=DATA, client="c0"),)), x, y


def gather(case: Case) -> ObservedGradients:
    (first,) = case.observations
    return ObservedGradients([first], model=build_network(first), device="cpu")


def read_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_wide_layer_is_found_by_its_shape_place_and_distribution() -> None:
    model = models.build(WIDE, DATA)
    weights = read_weights(model)
    assert find_gaussian_layer(model, weights) == find_wide_layer(model) == "1.widen"
    uniform = {**weights, "1.widen.weight": torch.rand(4096, 16, generator=Generator().manual_seed(0)) - 0.5}
    assert find_gaussian_layer(model, uniform) is None
    constant = {**weights, "1.widen.weight": torch.ones(4096, 16)}
    assert find_gaussian_layer(model, constant) is None
    shifted = {**weights, "1.widen.weight": weights["1.widen.weight"] + 1}
    assert find_gaussian_layer(model, shifted) is None
    for other in (
        nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 6)),  # a bias
        nn.Sequential(nn.Linear(16, 4096, bias=False), nn.Tanh(), nn.Linear(4096, 6)),
        nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 6)),  # not wide
        nn.Sequential(nn.Linear(16, 6)),
    ):
        assert find_wide_layer(other) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"base": "imprint"}, "model wide_head: base must be one of"),
        ({"features": 0}, "features must be a whole number from 1"),
        ({"neurons": 2.5}, "neurons must be a whole number from 1"),
        ({"base": "mlp", "activation": "tanh"}, "the base mlp has no argument activation"),
    ],
)
def test_wrong_arguments_of_the_model_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.build(ModelSpec(name="wide_head", arguments=wrong), DATA)


def test_features_are_recovered_from_an_update_with_an_error_flat_in_the_batch_size() -> None:
    errors = []
    for labels in ([4], [4, 0], [4, 0, 2, 5]):
        case, x, y = make_case(labels)
        seen = gather(case)
        found = recover_case_features(seen, y, Generator().manual_seed(0))
        features, _ = compute_head_inputs(seen.model, seen.data, seen.get_state(0)["weights"], x, layer="1.widen")
        unit = torch.nn.functional.normalize(features.double(), dim=1)
        columns = found.bases[:, :, 0].T
        basis, _ = torch.linalg.qr(columns)
        errors.append(float((unit - unit @ basis @ basis.T).norm(dim=1).mean()))
        assert float((unit * columns.T).sum(dim=1).min()) > 0.9  # of the same sign
    assert max(errors) < 0.12
    assert max(errors) < 2 * min(errors)


def test_mismatch_is_least_for_the_true_examples_in_their_order() -> None:
    case, x, y = make_case([4, 0, 2])
    seen = gather(case)
    found = recover_spans(seen, [0], y[None], [Generator().manual_seed(0)])
    assert 0.9 < float(found["trust"]) <= 1
    state = seen.get_state(0)["weights"]
    true, other = (float(measure_span_mismatch(seen, state, guess, found["bases"][0])) for guess in (x, torch.rand(x.shape)))
    assert 0 <= true < 0.02 < other <= 1
    assert float(measure_span_mismatch(seen, state, x, torch.zeros_like(found["bases"][0]))) == pytest.approx(1)


def measure_loss(weight: float, case: Case, guess: Tensor, y: Tensor, *, null: bool = False) -> float:
    attack = feature_reconstruction(tv=0.0, feature_matching=weight, decoder="pixels")
    batch = CaseBatch(attack.null() if null else attack, [case])
    z = guess.flatten()[None]
    features = batch.solve_features([0], y[None], [Generator().manual_seed(0)])
    return float(batch.evaluate(z, batch.build_problem([0], z, y[None], features=features))[1][0])


def test_loss_is_raised_by_the_trusted_mismatch_and_the_null_is_not() -> None:
    case, x, y = make_case([4, 0, 2])
    guess, seen = torch.rand(x.shape, generator=Generator().manual_seed(9)), gather(case)
    found = recover_spans(seen, [0], y[None], [Generator().manual_seed(0)])
    mismatch = float(measure_span_mismatch(seen, seen.get_state(0)["weights"], guess, found["bases"][0])) * float(found["trust"])
    raised = measure_loss(0.5, case, guess, y) - measure_loss(0.0, case, guess, y)
    assert raised == pytest.approx(0.5 * mismatch, rel=1e-3)
    assert measure_loss(0.5, case, guess, y, null=True) == 0


def test_weights_by_norm_give_tensors_equal_parts() -> None:
    observed = {"large": torch.full((3, 2), 5.0), "small": torch.tensor([1.0, -2.0])}
    weights = weigh_by_norm(observed)
    parts = [float(weights[name] * g.square().sum()) for name, g in observed.items()]
    assert parts == pytest.approx([0.5, 0.5])


def test_needs_name_the_added_layer_as_an_oracle_unless_the_last_layer_is_matched() -> None:
    stock, _, _ = make_case([1], ModelSpec(name="lenet_dlg"))
    wide, _, _ = make_case([1])
    (reason,) = find_unmet(feature_reconstruction(), stock)
    assert "wide linear layer with random Gaussian weights" in reason
    assert find_unmet(feature_reconstruction(), wide) == []
    assert list_oracles(feature_reconstruction().needs) == ("wide Gaussian layer",)
    other = feature_reconstruction(matched="head")
    assert find_unmet(other, stock) == []
    assert list_oracles(other.needs) == ()
    with pytest.raises(ValueError, match="argument matched must be one of gaussian, head, got 'body'"):
        feature_reconstruction(matched="body")


def test_spans_are_not_matched_if_the_defense_hides_the_last_layer() -> None:
    seen = gather(make_case([4, 0])[0])
    assert can_match_spans(seen)
    seen.omitted = frozenset({"1.classify.weight"})
    assert not can_match_spans(seen)
    stock = gather(make_case([4, 0], ModelSpec(name="lenet_dlg"))[0])
    assert not can_match_spans(stock)
    with pytest.raises(ValueError, match="no wide layer with random Gaussian weights"):
        recover_case_features(stock, torch.tensor([4, 0]), Generator().manual_seed(0))


def test_image_is_nearer_than_that_of_the_null() -> None:
    x = torch.linspace(0, 1, 8).expand(1, 1, 8, 8)
    case = Case((observe_steps((x, torch.tensor([4])), model=WIDE, data=DATA, client="c0"),))
    attack = AttackSpec(name="feature_reconstruction", arguments={"steps": 20}).build()
    (found,) = attack([case], rng=Generator().manual_seed(0))
    assert found.oracles == ("wide Gaussian layer",)
    assert found.attack == "feature_reconstruction"
    (null,) = attack.null()([case], rng=Generator().manual_seed(0))
    assert float((found.x - x).square().mean()) < 0.5 * float((null.x - x).square().mean())


def test_known_noise_turns_off_equal_parts_and_smooths_by_its_ratio_to_the_signal() -> None:
    x, y = torch.rand(2, *DATA.shape, generator=Generator().manual_seed(0)), torch.tensor([4, 0])
    cases = {
        defense: Case((observe_steps((x, y), model=WIDE, data=DATA, client="c0", defense=defense),))
        for defense in ("", "gaussian(0.0001)", "gaussian(0.001)", "gaussian(10)")
    }
    attack = feature_reconstruction(tv=0.001)
    batches = {defense: CaseBatch(attack, [case]) for defense, case in cases.items()}
    assert len(batches[""].views[0].rows["scale"]) == len(cases[""].observations[0].update)
    assert batches["gaussian(0.001)"].views[0].rows["scale"] == {}
    clean, faint, strong, all_noise = (float(batch.scales.smoothing) for batch in batches.values())
    assert clean == pytest.approx(0.001)
    assert clean < faint < strong < all_noise
    largest = 0.2 * 10 * x.numel() / NEIGHBOUR_CONTRAST / batches["gaussian(10)"].views[0].coordinates
    assert all_noise == pytest.approx(0.001 + largest, rel=0.1)
    assert float(CaseBatch(attack.null(), [cases["gaussian(10)"]]).scales.smoothing) == pytest.approx(0.001)
    ignorant = CaseBatch(feature_reconstruction(tv=0.001, knows_defense=False), [cases["gaussian(10)"]])
    assert float(ignorant.scales.smoothing) == pytest.approx(0.001)


@pytest.mark.parametrize("make", [inverting_gradients, feature_reconstruction])
def test_weight_of_known_noise_grows_with_the_examples(make: Callable[..., GradientMatching]) -> None:
    """The total variation is a mean over examples, and the negative log-prior a sum."""
    weights = []
    for count in (1, 4):
        x = torch.rand(1, *DATA.shape, generator=Generator().manual_seed(0)).repeat(count, 1, 1, 1)
        case = Case((observe_steps((x, torch.full((count,), 3)), model=WIDE, data=DATA, client="c0", defense="gaussian(10)"),))
        weights.append(float(CaseBatch(make(tv=0), [case]).scales.smoothing))  # the largest ratio for both
    assert weights[1] == pytest.approx(4 * weights[0], rel=1e-3)


def test_recovered_features_of_each_example_are_injected_into_one_network() -> None:
    case, x, y = make_case([4, 0, 2])
    seen, swapped = gather(case), torch.tensor([2, 0, 1])
    true, _ = compute_head_inputs(seen.model, seen.data, seen.get_state(0)["weights"], x, layer="1.widen")

    def start(attack: GradientMatching, labels: Tensor) -> tuple[CaseBatch, Tensor]:
        batch = CaseBatch(attack, [case])
        z = batch.space.encode([torch.full_like(x, 0.5)], [Generator().manual_seed(0)], "cpu")
        found = batch.solve_features([0], labels[None], [Generator().manual_seed(0)])
        return batch, batch.inject_features(z, [0], found)

    attack = feature_reconstruction(decoder="shared_prior", feature_matching=0)
    prior = DeepPrior(DATA.shape, codes=CODES)
    for order in (torch.arange(3), swapped):
        batch, z = start(attack, y[order])
        assert z.shape == (1, len(prior.weights) + 3 * (64 + CODES))
        codes = z[0, len(prior.weights) :].reshape(3, -1)[:, -CODES:]
        wanted = prior.inject(prior.encode(x), true[order])[:, -CODES:]  # from the true features, in the order of the labels
        assert float(torch.cosine_similarity(codes, wanted, dim=1).min()) > 0.9
        images, _ = batch.space.decode(z, y[None])
        assert not torch.allclose(images[0, 0], images[0, 1])  # equal starts, other features
    for other in (feature_reconstruction(decoder="shared_prior", injected=False), attack.null()):
        batch, z = start(other, y)
        assert not z[0, len(prior.weights) :].reshape(3, -1)[:, -CODES:].any()
        images, _ = batch.space.decode(z, y[None])
        assert torch.allclose(images[0, 0], images[0, 1])


def test_user_is_warned_that_the_server_has_added_the_layer() -> None:
    training = Training(learning_rate=0.1, batch_size=1, steps=1, mode="eval")
    assert models.list_warnings(models.build(WIDE, DATA), training, DATA) == [WIDE_HEAD_WARNING]
    assert models.list_warnings(models.build(ModelSpec(name="mlp"), DATA), training, DATA) == []
