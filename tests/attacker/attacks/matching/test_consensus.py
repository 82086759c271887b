"""Tests of group consistency: the starts of a case attract each other, and the attack's own loss alone chooses among them."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from generators import seeded
from observations import make_image_case
from torch import Tensor

from attacker.attacks import Case, Stop, cpl, inverting_gradients
from attacker.attacks.base import IntermediateResult, estimate_effort
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.matching_run import MatchingRun
from attacker.attacks.matching.priors import Consistency, compute_consensus, shift_onto
from attacker.attacks.optimisers.first_order import SGD, Adam

STARTS = 3


def grouped(weight: float, steps: int = 12, **arguments: Any) -> GradientMatching:
    return inverting_gradients(steps=steps, restarts=STARTS, consistency=weight, give_up=0.0, **arguments)


def test_without_a_weight_starts_are_searched_as_before() -> None:
    cases = [make_image_case(i)[0] for i in range(2)]
    plain, off = inverting_gradients(steps=8, restarts=STARTS), inverting_gradients(steps=8, restarts=STARTS, consistency=0.0)
    assert off.search == plain.search
    assert off.search.at_once == 1
    for one, other in zip(plain(cases, rng=seeded()), off(cases, rng=seeded()), strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.loss, other.loss)


def test_with_a_negligible_weight_the_best_of_the_separate_starts_is_found() -> None:
    """The separate starts are an oracle: what is returned is the start with the lowest loss, of the same starts."""
    cases = [make_image_case(i)[0] for i in range(2)]
    separate = inverting_gradients(steps=12, restarts=STARTS, give_up=0.0).copy_with(stop=Stop(stuck=0.0, patience=12))
    expected = separate(cases, rng=seeded())
    for one, other in zip(expected, grouped(1e-20)(cases, rng=seeded()), strict=True):
        assert other.restarts == one.restarts == STARTS
        assert other.evaluations == one.evaluations == STARTS * 12
        torch.testing.assert_close(other.x, one.x, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(other.loss, one.loss, rtol=1e-3, atol=1e-5)


def measure_spread(attack: GradientMatching, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the standard deviation over starts of each case's last candidates, (cases,), with `STARTS` starts per case."""
    evaluated: list[Tensor] = []
    original = CaseBatch.evaluate

    def watch(batch: CaseBatch, z: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        evaluated.append(z)
        return original(batch, z, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(CaseBatch, "evaluate", watch)
        attack(cases, rng=seeded())
    return evaluated[-1].view(len(cases), STARTS, -1).std(dim=1).mean(dim=1)


def test_a_large_weight_makes_the_starts_of_a_case_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of gradient descent halves the differences at this weight, whose candidates have 64 values."""
    cases = [make_image_case(i)[0] for i in range(2)]
    descent = SGD(learning_rate=0.016, momentum=0.0)
    free, bound = (grouped(weight, 20).copy_with(optimiser=descent) for weight in (1e-20, 1e3))
    for one, other in ((free, bound), (free.null(), bound.null())):
        apart = measure_spread(one, cases, monkeypatch)
        assert (apart > 0.1).all()
        assert (measure_spread(other, cases, monkeypatch) < 1e-3 * apart).all()


def test_cases_are_not_attracted_by_each_other() -> None:
    cases = [make_image_case(i)[0] for i in range(3)]
    together = grouped(10.0)(cases, rng=seeded(3))
    (alone,) = grouped(10.0)([cases[1]], rng=seeded(3))
    torch.testing.assert_close(together[1].x, alone.x, rtol=1e-3, atol=1e-3)


def test_the_term_changes_the_gradient_by_its_derivative_and_leaves_the_loss() -> None:
    """The consensus is a mean, so that the gradient is the same whether or not it counts as constant."""
    attack = grouped(0.7)
    batch, pending = CaseBatch(attack, [make_image_case(i)[0] for i in range(2)]), [0, 0, 0, 1, 1, 1]
    z = torch.rand(6, 64, generator=seeded(1))
    problem = batch.build_problem(pending, z, torch.tensor([[0]] * 3 + [[1]] * 3))
    slope, loss = batch.evaluate(z, problem)
    own_slope, own_loss = batch.evaluate(z, {name: value for name, value in problem.items() if name != "group"})
    assert torch.equal(loss, own_loss)

    free = z.clone().requires_grad_()
    groups = free.view(2, STARTS, 64)
    (0.7 * (groups - groups.mean(dim=1, keepdim=True)).square().mean(dim=2)).sum().backward()
    torch.testing.assert_close(slope - own_slope, free.grad, rtol=1e-3, atol=1e-6)


def test_a_consensus_is_the_mean_of_the_group() -> None:
    x = torch.tensor([0.0, 2.0, 10.0]).view(3, 1, 1)
    assert compute_consensus(x, torch.tensor([2, 2, 5])).flatten().tolist() == [1.0, 1.0, 10.0]


def test_registration_undoes_a_shift() -> None:
    x = torch.rand(2, 3, 9, 12, generator=seeded(4))
    for shift in ((0, 0), (2, -3), (-4, 5)):
        assert torch.equal(shift_onto(x.roll(shift, dims=(2, 3)), x), x)
    group = torch.stack([x, x, x.roll((1, 2), dims=(2, 3))])
    one = torch.zeros(3, dtype=torch.long)
    torch.testing.assert_close(compute_consensus(group, one, registered=True), x.expand(3, *x.shape))
    assert (compute_consensus(group, one) - x).abs().max() > 0.1


def test_rows_are_not_registered() -> None:
    rows, one = torch.rand(3, 2, 7, generator=seeded(5)), torch.zeros(3, dtype=torch.long)
    assert torch.equal(compute_consensus(rows, one, registered=True), compute_consensus(rows, one))


def test_all_starts_at_once_are_counted_as_effort() -> None:
    single, group = estimate_effort(inverting_gradients(steps=7)), estimate_effort(grouped(0.1, steps=7))
    assert (single.evaluations, single.searches, single.starts) == (7, 1, 1)
    assert (group.evaluations, group.searches, group.starts) == (7 * STARTS, STARTS, 1)


def test_the_live_display_shows_the_best_start_of_each_case() -> None:
    run = MatchingRun(grouped(0.1), [make_image_case(i)[0] for i in range(2)], seeded(), None)
    z, loss = torch.rand(6, 64, generator=seeded(6)), torch.tensor([3.0, 1.0, 2.0, 5.0, 6.0, 4.0])
    state = {"found.z": z, "found.loss": loss, "active.ids": torch.arange(6), "active.best_z": z, "active.best": loss}
    shown: list[IntermediateResult] = []
    run._show(
        run.parts[0],
        [0, 0, 0, 1, 1, 1],
        torch.zeros(6, 1, dtype=torch.long),
        lambda sights, *_: shown.extend(sights),
        state | {"active.history": loss[None]},
    )
    assert [sight.loss for sight in shown] == [1.0, 4.0]
    for sight, row in zip(shown, (1, 5), strict=True):
        torch.testing.assert_close(sight.x.flatten(), z[row])


class Kept:
    """A checkpoint storage that keeps every state, and recalls those in `known`."""

    every, look = 0.0, None

    def __init__(self, known: dict[str, dict[str, Tensor]]) -> None:
        self.known, self.states = known, []

    def recall(self, key: str) -> dict[str, Tensor] | None:
        return self.known.get(key)

    def keep(self, key: str, state: Mapping[str, Tensor], *, drop: str = "") -> None:
        self.states.append((key, {name: t.clone() for name, t in state.items()}))


def test_a_search_of_all_starts_resumes_from_its_checkpoint() -> None:
    cases, attack = [make_image_case(i)[0] for i in range(2)], grouped(0.1, steps=8)
    first = Kept({})
    whole = attack(cases, rng=seeded(), memory=first)
    key, state = first.states[3]
    assert (key, len(state["active.history"])) == ("restart 0", 4)
    for one, other in zip(whole, attack(cases, rng=seeded(), memory=Kept({key: state})), strict=True):
        torch.testing.assert_close(one.x, other.x)
        assert one.iterations == other.iterations == STARTS * 8


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: inverting_gradients(consistency=0.1), "set restarts to at least 2, got 1"),
        (lambda: Consistency(weight=-1.0), "must be above 0, got -1.0"),
        (lambda: cpl(restarts=2).copy_with(consistency=Consistency(weight=1.0)), "choose another optimiser, such as adam"),
        (lambda: grouped(0.1, closed_form_start=True), "set consistency=0, or closed_form_start=false"),
    ],
)
def test_contradictory_settings_are_refused(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_every_first_order_optimiser_takes_the_term() -> None:
    attack = cpl(restarts=2, optimiser="adam").copy_with(consistency=Consistency(weight=1.0))
    assert isinstance(attack.search.optimiser, Adam)
    assert attack.search.at_once == 2
