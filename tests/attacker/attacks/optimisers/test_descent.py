"""Tests of the optimisation loop: it keeps the best latent of each problem, drops finished ones, and returns results in order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attacker.attacks.optimisers.descent import Minima, Problems, descend
from attacker.attacks.optimisers.first_order import SGD, Adagrad, Adam, Optimiser, OptimiserState, Stepper
from attacker.attacks.optimisers.lbfgs import LBFGS
from attacker.attacks.optimisers.stopping import MIN_GIVE_UP_STEPS, Stall, Stop

Evaluate = Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, Tensor]]
TARGETS = torch.tensor([[0.0], [3.0], [-2.0], [5.0]])


def bowl(z: Tensor, per_problem: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute slopes and losses of the squared distance of each problem to its target."""
    offset = z - per_problem["target"]
    return 2 * offset, offset.square().sum(dim=1)


def replace_last(slope: float, compute: Callable[[Tensor], Tensor]) -> Evaluate:
    """Return `bowl` with another slope, and with the losses `compute(z)`, for the last problem. z: (P,)."""

    def evaluate(z: Tensor, per_problem: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        gradient, loss = bowl(z, per_problem)
        last = per_problem["target"].flatten() == 5
        return torch.where(last[:, None], slope, gradient), torch.where(last, compute(z.flatten()), loss)

    return evaluate


HALVED = replace_last(-1.0, lambda z: 7.0 - 3.5 * (z > 0.15))
"""The loss of the last problem is 7, and 3.5 from the second iteration on; the others converge."""


def search(
    evaluate: Evaluate = bowl,
    *,
    steps: int = 400,
    stop: Stop | None = None,
    enough: float = 1e-6,
    least: float = 0.0,
    floor: float = 0.0,
    plain: Tensor | None = None,
    **settings,
) -> Minima:
    problems = Problems(
        evaluate=lambda z, per_problem, share: evaluate(z, per_problem),
        per_problem={"target": TARGETS},
        project=lambda z: z,
        enough=torch.full((4,), enough),
        least=torch.full((4,), least),
        floor=torch.full((4,), floor),
        plain=plain,
    )
    optimiser = settings.pop("optimiser", Adam(learning_rate=0.2, decay_at=()))
    return descend(torch.zeros(4, 1), problems, optimiser, steps, stop or Stop(patience=400), **settings)


def test_the_data_of_problems_are_not_copied_while_all_are_searched() -> None:
    """Among them are gradients, which take as much memory as the network."""
    places = []

    def note(z: Tensor, per_problem: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        places.append(per_problem["target"].data_ptr() == TARGETS.data_ptr())
        return bowl(z, per_problem)

    iterations = search(note).iterations
    assert places == [True] * min(iterations) + [False] * (max(iterations) - min(iterations))


def test_each_problem_finds_its_own_target() -> None:
    found = search()
    torch.testing.assert_close(torch.stack(found.z), TARGETS, atol=2e-3, rtol=0)
    assert found.iterations[0] == 1
    assert len(set(found.iterations)) == 4
    assert [len(h) for h in found.history] == found.iterations
    assert all(loss <= 1e-6 for loss in found.loss)


def test_the_history_is_the_best_loss_so_far() -> None:
    for history in search(enough=0.0, steps=60).history:
        assert (history[1:] <= history[:-1]).all()


def test_the_best_iterate_is_kept_when_the_search_runs_away() -> None:
    class Away:
        """An optimiser that steps over the target and never stops."""

        period = 1

        def start(self) -> Stepper:
            return self

        def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
            return z + 1

        def keep(self, rows: Tensor) -> None: ...

        def state(self) -> OptimiserState:
            return {}

        def load(self, state: OptimiserState) -> None: ...

    found = search(optimiser=Away(), steps=20, enough=-1.0)
    assert [float(z) for z in found.z] == [0, 3, 0, 5]
    assert found.loss == [0, 0, 4, 0]


def test_a_plateau_ends_a_problem_after_its_patience() -> None:
    found = search(replace_last(0.0, lambda z: 7 + 0 * z), stop=Stop(patience=9), steps=200)
    assert found.iterations[3] == 9
    assert found.loss[3] == 7


@pytest.mark.parametrize("give_up", [0.0, 0.25])
def test_slow_problem_is_given_up_if_requested(give_up: float) -> None:
    slow, stop = replace_last(-1.0, lambda z: 7.0 - 0.05 * z), Stop(patience=400, give_up=give_up)
    found = search(slow, stop=stop, steps=160, enough=-1.0)
    assert found.iterations == ([160] * 3 + [40] if give_up else [160] * 4)
    assert found.given_up == [False] * 3 + [give_up > 0]
    assert found.loss[3] < 7
    assert Minima.of(found.get_state()).given_up == found.given_up
    short = search(slow, stop=stop, steps=MIN_GIVE_UP_STEPS, enough=-1.0)
    assert short.given_up == [False] * 3 + [give_up > 0]
    assert not any(search(slow, stop=stop, steps=MIN_GIVE_UP_STEPS - 1, enough=-1.0).given_up)


def test_early_limits_give_up_a_problem_before_the_share_of_the_steps() -> None:
    def count_iterations(*, give_up: float = 0.25, early: tuple[tuple[int, float], ...], **losses: float) -> list[int]:
        stop = Stop(patience=400, give_up=give_up, early=early)
        found = search(HALVED, stop=stop, steps=160, enough=-1.0, **losses)
        assert found.given_up == [False] * 3 + [found.iterations[3] < 160]
        return found.iterations

    assert count_iterations(early=((10, 0.4), (20, 0.1))) == [160] * 3 + [10]
    assert count_iterations(early=((10, 0.6), (20, 0.4))) == [160] * 3 + [20]
    assert count_iterations(early=((10, 0.6),)) == [160] * 3 + [40]
    assert count_iterations(early=((10, 0.4),), least=4.0) == [160] * 4
    assert count_iterations(early=((10, 0.4),), floor=3.4) == [160] * 4
    assert count_iterations(early=((10, 0.4),), floor=1.0) == [160] * 3 + [10]
    assert count_iterations(early=((10, 0.4),), give_up=0.0) == [160] * 4
    assert count_iterations(early=((10, 0.4),), give_up=0.05) == [160] * 3 + [30]


@pytest.mark.parametrize(
    ("changed", "plain", "others", "stopped"),
    [
        ({}, 0.0, {}, True),  # 3.5 is above 0.4 * 7 and 0.9 * 3.5
        ({"plain": 0.6}, 0.0, {}, False),
        ({"plain": 0.6}, 1.0, {}, True),  # plain examples at z = 1 have half the loss
        ({"since": 1}, 0.0, {}, False),  # the loss was still 7
        ({}, 0.0, {"floor": 3.0}, False),
        ({}, 0.0, {"give_up": 0.0}, False),
        ({}, 0.0, {"give_up": 0.05}, True),
        ({"least": 160}, 0.0, {}, True),
        ({"least": 161}, 0.0, {}, False),  # the search is too short for this test
        ({}, None, {}, False),
    ],
)
def test_stalled_problem_is_given_up(
    changed: dict[str, float], plain: float | None, others: dict[str, float], stopped: bool
) -> None:
    """Plain examples, at the same z for all problems, tell the loss from which a search must get away."""
    test = Stall(**{"after": 10, "since": 5, "plain": 0.4, "fall": 0.9} | changed)
    stop = Stop(patience=400, give_up=others.pop("give_up", 0.1), hopeless=1.0, stall=test)
    at = None if plain is None else torch.full((4, 1), plain)
    found = search(HALVED, stop=stop, steps=160, enough=-1.0, least=4.0, plain=at, **others)
    assert found.iterations == [160] * 3 + [10 if stopped else 160]
    assert found.given_up == [False] * 3 + [stopped]


def test_problem_with_nan_ends_with_its_last_finite_best() -> None:
    def explodes(z: Tensor, per_problem: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        gradient, loss = bowl(z, per_problem)
        last = (per_problem["target"].flatten() == 5) & (z.flatten() != 0)
        return torch.where(last[:, None], torch.nan, gradient), torch.where(last, torch.nan, loss)

    found = search(explodes)
    assert float(found.z[3]) == 0
    assert found.loss[3] == 25
    assert found.iterations[3] < 5
    torch.testing.assert_close(torch.stack(found.z[:3]), TARGETS[:3], atol=2e-3, rtol=0)


def test_interrupt_ends_with_the_best_so_far() -> None:
    calls = []

    def interrupted(z: Tensor, per_problem: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return bowl(z, per_problem)

    found = search(interrupted)
    assert found.interrupted
    assert found.loss[1] < 9
    assert float(found.z[1]) > 0.5


OPTIMISERS = [
    Adam(learning_rate=0.2),
    SGD(learning_rate=0.05),
    Adagrad(),
    LBFGS(learning_rate=0.2, period=3),
    LBFGS(line_search=True, period=2),
]


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("at", [1, 5, 11])
def test_resumed_search_ends_at_the_same_result(optimiser: Optimiser, at: int) -> None:
    def wavy(z: Tensor, per_problem: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        offset = z - per_problem["target"]
        return 2 * offset + 0.3 * torch.cos(3 * z), offset.square().sum(dim=1) + 0.1 * torch.sin(3 * z).sum(dim=1)

    kept: list[OptimiserState] = []

    def checkpoint(state: Callable[[], OptimiserState]) -> None:
        kept.append({name: t.clone() for name, t in state().items()})

    settings = {"steps": 14, "enough": -9.0, "optimiser": optimiser, "stop": Stop(patience=6)}
    whole = search(wavy, **settings, checkpoint=checkpoint)
    resumed = search(wavy, **settings, resume=kept[min(at, len(kept)) - 1])
    assert resumed.loss == whole.loss
    assert resumed.iterations == whole.iterations
    for mine, its in zip(whole.z + whole.history, resumed.z + resumed.history, strict=True):
        assert torch.equal(mine, its)


def test_checkpoint_holds_finished_and_active_problems() -> None:
    kept: list[OptimiserState] = []
    search(checkpoint=lambda state: kept.append({name: t.clone() for name, t in state().items()}))
    assert kept[0]["active.ids"].tolist() == [1, 2, 3]
    assert kept[0]["found.iterations"].tolist() == [1, 0, 0, 0]
    assert kept[0]["found.loss"][0] == 0
    assert len({len(state["active.ids"]) for state in kept}) == 3


def test_best_of_the_coarse_steps_is_discarded() -> None:
    """Coarse losses are lower than all exact ones, and have another minimum: only results after the coarse steps count."""

    def evaluate(z: Tensor, per_problem: dict[str, Tensor], share: float) -> tuple[Tensor, Tensor]:
        slope, loss = bowl(z, per_problem)
        return (slope - 1, loss - 100) if share < 0.5 else (slope, loss)

    problems = Problems(evaluate, {"target": TARGETS}, lambda z: z, torch.full((4,), -1e9), anew=0.5)
    found = descend(torch.zeros(4, 1), problems, Adam(learning_rate=0.2, decay_at=()), 400, Stop(patience=400))
    torch.testing.assert_close(torch.stack(found.z), TARGETS, atol=2e-3, rtol=0)
    assert min(found.loss) >= 0
    assert all(float(history[199]) < -90 < 0 <= float(history[200]) for history in found.history)
