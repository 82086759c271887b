"""Tests of the attack `accumulate`: one objective over all rounds, which simulates the error feedback of a compressor."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from observations import observe_rounds
from torch import Tensor
from torch.func import jvp, vjp
from torch.nn.functional import one_hot

from attacker.attacks import Case, accumulate
from attacker.attacks.matching import case_batch, matching_run
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.multi_round import refinement
from attacker.attacks.multi_round.refinement import SentEquations
from attacker.attacks.multi_round.usable_rounds import link_same
from attacker.attacks.optimisers.gauss_newton import LeastSquares, minimise_squares, project_out
from attacker.scoring.metrics import psnr
from fedsim.recording import DataSpec, ModelSpec
from fedsim.recording.codec import encode

DATA = DataSpec(shape=(1, 8, 8), num_classes=4)
LENET = ModelSpec(name="lenet_dlg")


def make_example(seed: int = 0) -> Tensor:
    grid = torch.linspace(0, 1, 8)
    return (0.5 + 0.4 * torch.sin(3 * grid[:, None] + seed) * torch.cos(2 * grid[None] - seed))[None, None]


def record(x: Tensor, y: Tensor, rounds: int, defense: str, *, client: str = "a", rate: float = 0.05) -> Case:
    """Return rounds of one client that trains on the same examples in each; model and defense state change with the rounds."""
    return observe_rounds([[(x, y)]] * rounds, model=LENET, data=DATA, defense=defense, client=client, learning_rate=rate)


def evaluate(cases: Sequence[Case], x: Tensor, y: Tensor, *, residual: bool = True) -> tuple[Tensor, Tensor]:
    """Return slope and loss of the objective at examples x (cases, N, *shape), without a prior."""
    attack = accumulate(tv=0.0, decoder="pixels", residual=residual).matching
    linked = [replace(case, links=link_same([len(y)] * len(case.observations))) for case in cases]
    batch = CaseBatch(attack, linked)
    z, labels = x.flatten(1), y.expand(len(cases), -1)
    problem = batch.build_problem(range(len(cases)), z, labels)
    slope, loss = batch.evaluate(z, problem)
    return slope / problem["gain"][:, None], loss / problem["gain"]


@pytest.mark.parametrize("defense", ["top_k(0.05, error_feedback=True)", "dgc(0.05)", "sign('mean', error_feedback=True)"])
def test_true_examples_fit_all_rounds_only_with_the_residual(defense: str) -> None:
    x, y = make_example(), torch.tensor([2])
    case = record(x, y, 5, defense)
    wrong = evaluate([case], torch.rand(x.shape)[:, 0], y)[1]
    followed, alone = (evaluate([case], x[:, 0], y, residual=chosen)[1] for chosen in (True, False))
    assert float(followed) < 1e-2 * float(wrong)
    assert float(followed) < 1e-2 * float(alone)


def test_slope_is_the_derivative_of_the_loss_and_cases_do_not_mix() -> None:
    """The references are finite differences of the loss, and each client alone."""
    y, rng = torch.tensor([1]), torch.Generator().manual_seed(3)
    cases = [record(make_example(i), y, 3, "top_k(0.1, error_feedback=True)", client=f"c{i}") for i in range(2)]
    x = torch.rand(2, 1, 8, 8, generator=rng)
    slope, loss = evaluate(cases, x, y)
    for i, case in enumerate(cases):
        own_slope, own_loss = evaluate([case], x[i : i + 1], y)
        torch.testing.assert_close(own_loss[0], loss[i], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(own_slope[0], slope[i], rtol=2e-2, atol=1e-2 * float(slope[i].abs().max()))
    direction = torch.randn(x.shape, generator=rng)
    step = 1e-2
    ahead, behind = (evaluate(cases, x + sign * step * direction, y)[1] for sign in (1, -1))
    along = (slope.reshape(x.shape) * direction).flatten(1).sum(dim=1)
    torch.testing.assert_close((ahead - behind) / (2 * step), along, rtol=0.1, atol=1e-2 * float(along.abs().max()))


def test_more_rounds_lower_the_error_with_error_feedback() -> None:
    x, y = make_example(), torch.tensor([2])
    case = record(x, y, 6, "top_k(0.02, error_feedback=True)", rate=0.01)
    attack = accumulate(steps=4, decoder="pixels", tv=1e-5)
    found = [attack([replace(case, observations=case.observations[:count])], rng=torch.Generator())[0] for count in (1, 6)]
    errors = [float((one.x - x).square().mean()) for one in found]
    assert errors[1] < 0.25 * errors[0]
    assert found[1].y.tolist() == [2]
    assert found[1].notes[0] == "all 6 rounds are assumed to hold the same examples"
    assert [slot.round for slot in found[1].slots] == list(range(1, 7))


def test_solved_equations_are_kept_if_the_user_interrupts_afterwards(monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(refinement, "exclude_output_errors", interrupt)
    x, y = (255 * make_example()).round() / 255, torch.tensor([2])
    case = record(x, y, 8, "top_k(0.05, error_feedback=True)")
    (found,) = accumulate(steps=1, decoder="pixels", tv=1e-5)([case], rng=torch.Generator())
    assert found.interrupted
    assert float(psnr(found.x, x)) > 80


@pytest.mark.parametrize("defense", ["top_k(0.05, error_feedback=True)", "dgc(0.05)"])
def test_values_sent_in_enough_rounds_determine_the_example_exactly(defense: str) -> None:
    """What is kept back is sent later, so that eight rounds give more equations than the example has values."""
    x, y = (255 * make_example()).round() / 255, torch.tensor([2])
    case = record(x, y, 8, defense)
    attack = accumulate(steps=1, decoder="pixels", tv=1e-5)
    searched, refined = (replace(attack, refined=some)([case], rng=torch.Generator())[0] for some in (False, True))
    assert float(psnr(searched.x.clamp(0, 1), x)) < 50
    assert float(psnr(refined.x, x)) > 80
    assert float(refined.confidence) > 0.9
    assert any("Gauss-Newton steps solved" in note for note in refined.notes)
    assert not any("undecided" in note for note in refined.notes)


@pytest.mark.parametrize("defense", ["top_k(0.05, error_feedback=True)", "dgc(0.05)"])
def test_equations_hold_at_the_true_example_and_are_linearised_exactly(monkeypatch, defense: str) -> None:
    """The references are derivatives of the residual by PyTorch, through the simulated defense of all rounds."""
    x, y = make_example(), torch.tensor([2])
    case = record(x, y, 5, defense)
    values = SentEquations(case.observations, y, [torch.tensor([0])] * 5, device="cpu")
    assert float(values.compute_residual(x.double().flatten()).norm() / values.values.norm()) < 1e-6
    at, d = torch.rand(2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    image, (_, pull) = jvp(values.compute_residual, (at,), (d,))[1], vjp(values.compute_residual, at)
    linear = values.linearise(at)
    torch.testing.assert_close(linear.differentiate(at).along(d), image, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.differentiate(at).back(image), pull(image)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.jacobian @ d.float(), image.float(), rtol=1e-3, atol=1e-3)
    monkeypatch.setattr(refinement, "ANCHORS", 3)
    error = values.linearise(at).jacobian @ d.float() - image
    assert 0 < float(error.norm() / image.norm()) < 0.1


def test_errors_of_derivatives_by_outputs_are_excluded(monkeypatch) -> None:
    """The derivative of cross-entropy by the outputs is softmax minus label, so that other soft labels change it by any error."""
    x, y, places = make_example(), torch.tensor([2]), [torch.tensor([0])] * 12
    rounds = record(x, y, 12, "top_k(0.05, error_feedback=True)").observations
    right, at = one_hot(y, 4).double(), x.double().flatten()
    error = torch.tensor([[0.3, -0.1, 0.4, 0.2]], dtype=torch.float64)
    values, wrong = (SentEquations(rounds, labels, places, device="cpu") for labels in (right, right + error))
    change = wrong.compute_residual(at) - values.compute_residual(at)
    basis = values.find_output_errors(at)
    assert basis.shape == (values.count, 12 * 4)
    assert float(project_out(basis, change).norm()) < 1e-4 * float(change.norm())
    moved = values.compute_residual(at + 0.1) - values.compute_residual(at)
    assert float(project_out(basis, moved).norm()) > 0.3 * float(moved.norm())
    monkeypatch.setattr(refinement, "MAX_ENTRIES", basis.numel() - 1)
    assert values.find_output_errors(at) is None


def test_solution_is_nearer_to_the_example_without_errors_of_derivatives_by_outputs() -> None:
    """The client's derivatives by the outputs are off by 1e-4, which soft labels bring about."""
    x, places = make_example(), [torch.tensor([0])] * 24
    rounds = record(x, torch.tensor([2]), 24, "top_k(0.05, error_feedback=True)").observations
    right, at = one_hot(torch.tensor([2]), 4).double(), x.double().flatten()
    off = 1e-4 * torch.tensor([[0.3, -0.1, 0.4, 0.2]], dtype=torch.float64)
    values, wrong = (SentEquations(rounds, labels, places, device="cpu") for labels in (right, right + off))
    values.values = wrong.send(wrong.compute_gradients(at))
    problem = LeastSquares(values.compute_residual, values.linearise)
    end = minimise_squares(problem, at + 1e-3, steps=8)
    last = refinement.exclude_output_errors(values, problem, end)
    before, after = (float((one.z - at).norm()) for one in (end, last))
    assert after < 0.1 * before
    assert last.steps > end.steps


def take_two_rounds(case: Case) -> Case:
    return replace(case, observations=case.observations[:2])


def tell_wrong_labels(case: Case) -> Case:
    return replace(case, known_labels=torch.tensor([1] * len(case.observations)))


def use_fewer_examples_once(case: Case) -> Case:
    last = replace(case.observations[-1], num_examples=1)
    return replace(case, observations=(*case.observations[:-1], last))


@pytest.mark.parametrize(
    ("change", "examples", "compare", "reason"),
    [
        (take_two_rounds, 1, "same", "values were sent, and the examples have 64"),
        (tell_wrong_labels, 1, "same", "was kept"),
        (use_fewer_examples_once, 2, "none", "rounds have different numbers of examples"),
    ],
)
def test_unsuitable_equations_keep_the_answer_of_the_search(change, examples: int, compare: str, reason: str) -> None:
    x, y = torch.cat([make_example(seed) for seed in range(examples)]), torch.arange(examples)
    keep = 0.002 if change is take_two_rounds else 0.05
    case = change(record(x, y, 8 if compare == "same" else 3, f"top_k({keep}, error_feedback=True)"))
    attack = accumulate(steps=2, decoder="pixels", tv=1e-5, compare=compare)
    searched, refined = (replace(attack, refined=some)([case], rng=torch.Generator())[0] for some in (False, True))
    torch.testing.assert_close(refined.x, searched.x, rtol=0, atol=0)
    assert any(reason in note for note in refined.notes)


def test_unusable_round_is_left_out_with_a_note() -> None:
    case = record(make_example(), torch.tensor([2]), 3, "gaussian(0.001)")
    damaged = {name: torch.full_like(t, torch.nan) for name, t in case.observations[1].update.items()}
    rounds = (case.observations[0], replace(case.observations[1], payload=encode(damaged)), case.observations[2])
    (found,) = accumulate(steps=2)([Case(rounds)], rng=torch.Generator())
    assert found.notes[0].startswith("round 2: its update contains NaN")
    assert {slot.round for slot in found.slots} == {1, 3}


def test_rounds_of_different_sizes_are_refused_with_advice() -> None:
    both = [record(make_example().expand(n, -1, -1, -1), torch.arange(n), 1, "").observations[0] for n in (1, 2)]
    rounds = tuple(replace(one, round=number, num_examples=number) for number, one in enumerate(both, start=1))
    with pytest.raises(ValueError, match=r"from 1 to 2 examples.*compare=features"):
        accumulate(steps=1, closed_forms=False)([Case(rounds)], rng=torch.Generator())


def test_labels_with_noise_are_inferred_from_the_mean_of_all_rounds() -> None:
    """One noisy round names a wrong label; the mean of eight names the right one."""
    case = record(make_example(), torch.tensor([3]), 8, "gaussian(0.01)", rate=0.02)
    one, all_rounds = (
        accumulate(steps=1)([replace(case, observations=case.observations[:n])], rng=torch.Generator())[0].y.tolist()
        for n in (1, 8)
    )
    assert (one, all_rounds) != ([3], one)
    assert all_rounds == [3]


@pytest.mark.parametrize("search", ["cpl", "inverting_gradients", "agic"])
def test_every_search_can_use_several_rounds(search: str) -> None:
    case = record(make_example(), torch.tensor([1]), 2, "")
    attack = accumulate(search=search, steps=2)
    (found,) = attack([case], rng=torch.Generator())
    assert found.attack == "accumulate"
    (null,) = attack.null()([case], rng=torch.Generator())
    assert null.x.shape == found.x.shape


def test_surrogate_weights_are_used_in_order_as_in_separate_rounds() -> None:
    """Without a defense that keeps a state, both ways compute the same loss."""
    y = torch.tensor([2])
    case = record(make_example(), y, 2, "", rate=0.5)
    rounds = tuple(replace(one, training=replace(one.training, steps=2)) for one in case.observations)
    case = replace(case, observations=rounds, links=link_same([1, 1]))
    z = torch.cat([make_example(1).flatten(), torch.tensor([0.3])])[None]
    found = []
    for residual in (True, False):
        attack = accumulate(tv=0.0, decoder="pixels", residual=residual).matching.copy_with(surrogate=True)
        batch = CaseBatch(attack, [case])
        assert (batch.in_order is not None) is residual
        found.append(batch.evaluate(z, batch.build_problem([0], z, y[None])))
    (slope, loss), (expected_slope, expected_loss) = found
    torch.testing.assert_close(loss, expected_loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-3, atol=1e-4 * float(expected_slope.abs().max()))
    assert float(slope[0, -1].abs()) > 0


@pytest.mark.parametrize(("residual", "anew"), [(True, 0.0), (False, 0.5)])
def test_search_in_order_keeps_its_best_result_since_its_loss_is_never_coarse(
    monkeypatch: pytest.MonkeyPatch, residual: bool, anew: float
) -> None:
    given, descend = [], matching_run.descend
    monkeypatch.setattr(case_batch, "get_fast_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(matching_run, "descend", lambda *a, **named: (given.append(a[1].anew), descend(*a, **named))[1])
    case = replace(record(make_example(), torch.tensor([2]), 2, ""), links=link_same([1, 1]))
    attack = accumulate(search="inverting_gradients", steps=2, residual=residual).matching.copy_with(coarse=0.5)
    attack([case], rng=torch.Generator())
    assert given == [anew]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown search 'dlg'"):
        accumulate(search="dlg")
    with pytest.raises(ValueError, match=r"argument compare must be one of .*, got 'published'"):
        accumulate(compare="published")
