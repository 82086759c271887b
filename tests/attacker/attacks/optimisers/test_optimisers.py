"""Tests that each batched optimiser treats every row like PyTorch's optimiser treats that row alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attacker.attacks.optimisers.conjugate_gradients import conjugate_gradients
from attacker.attacks.optimisers.first_order import SGD, Adagrad, Adam, Optimiser, Stepper
from attacker.attacks.optimisers.lbfgs import LBFGS, LBFGSStepper
from attacker.attacks.optimisers.phases import PhasedOptimiser

PROBLEMS, SIZE = 5, 12


def compute_loss(scale: Tensor, shift: Tensor, z: Tensor) -> Tensor:
    """Compute a smooth non-quadratic function, different for each row, (P,)."""
    return (scale * (z - shift) ** 2).sum(-1) + torch.cos(z).sum(-1) + 0.1 * (z[..., 1:] * z[..., :-1]).sum(-1)


@pytest.fixture
def problems() -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    draw = torch.rand(3, PROBLEMS, SIZE, generator=rng, dtype=torch.float64)
    return 0.6 + draw[0], 4 * draw[1] - 2, 6 * draw[2] - 3


def next_of(stepper: Stepper, scale: Tensor, shift: Tensor, z: Tensor, progress: float = 0.0) -> Tensor:
    leaf = z.clone().requires_grad_()
    loss = compute_loss(scale, shift, leaf)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return stepper.step(z, gradient, loss.detach(), progress)


def run(optimiser: Optimiser, scale: Tensor, shift: Tensor, z: Tensor, steps: int) -> Tensor:
    stepper = optimiser.start()
    for i in range(steps):
        z = next_of(stepper, scale, shift, z, i / steps)
    return z


OPTIMISERS = [
    LBFGS(learning_rate=0.3, history=4),
    LBFGS(line_search=True),
    Adam(learning_rate=0.05),
    SGD(learning_rate=0.02),
    Adagrad(),
]


@pytest.mark.parametrize("history", [3, 20, 100])
def test_lbfgs_agrees_with_torch_for_each_row(problems: tuple[Tensor, Tensor, Tensor], history: int) -> None:
    scale, shift, start = problems
    ours = run(LBFGS(history=history, learning_rate=0.3), scale, shift, start, steps=30)
    for row in range(PROBLEMS):
        z = start[row].clone().requires_grad_()
        theirs = torch.optim.LBFGS([z], lr=0.3, max_iter=30, history_size=history, tolerance_grad=0, tolerance_change=0)

        def closure(row: int = row, z: Tensor = z, theirs: torch.optim.LBFGS = theirs) -> Tensor:
            theirs.zero_grad()
            loss = compute_loss(scale[row], shift[row], z)
            loss.backward()
            return loss

        theirs.step(closure)
        torch.testing.assert_close(ours[row], z.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("own", "make", "signed"),
    [
        (Adam(learning_rate=0.05, decay_at=()), lambda z: torch.optim.Adam([z], lr=0.05), False),
        (Adam(learning_rate=0.05, signed=True, decay_at=()), lambda z: torch.optim.Adam([z], lr=0.05), True),
        (Adam(decay_at=(), betas=(0.8, 0.99)), lambda z: torch.optim.Adam([z], lr=0.1, betas=(0.8, 0.99)), False),
        (SGD(learning_rate=0.03, momentum=0.0), lambda z: torch.optim.SGD([z], lr=0.03), False),
        (SGD(learning_rate=0.03, momentum=0.9), lambda z: torch.optim.SGD([z], lr=0.03, momentum=0.9), False),
        (Adagrad(learning_rate=0.2), lambda z: torch.optim.Adagrad([z], lr=0.2), False),
    ],
)
def test_first_order_optimisers_agree_with_torch(
    problems: tuple[Tensor, Tensor, Tensor], own: Optimiser, make: Callable[[Tensor], torch.optim.Optimizer], signed: bool
) -> None:
    """signed: whether PyTorch's optimiser gets the signs of the gradient."""
    ours, (scale, shift, start) = run(own, *problems, steps=20), problems
    z = start.clone().requires_grad_()
    theirs = make(z)
    for _ in range(20):
        theirs.zero_grad()
        compute_loss(scale, shift, z).sum().backward()
        if signed:
            z.grad.sign_()
        theirs.step()
    torch.testing.assert_close(ours, z.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("betas", [(1.0, 0.99), (0.8, -0.1)])
def test_decay_rates_of_adam_outside_of_their_range_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="beta1 and beta2"):
        Adam(betas=betas)


@pytest.mark.parametrize("last", [0.1, 1.0])
def test_cosine_schedule_agrees_with_torch(last: float) -> None:
    own, steps = Adam(learning_rate=0.05, decay_at=(), cosine=last), 7
    theirs = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=steps, eta_min=0.05 * last)
    for step in range(steps + 1):
        assert own.compute_rate(step / steps) == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        theirs.step()
        schedule.step()


def test_adam_takes_a_tenth_of_the_step_after_each_decay() -> None:
    z, gradient, loss = torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1)
    stepper = Adam(learning_rate=1.0, decay_at=(0.5,)).start()
    before = stepper.step(z, gradient, loss, 0.49)
    after = stepper.step(z, gradient, loss, 0.5)
    assert before.item() == pytest.approx(-1, rel=1e-6)
    assert after.item() == pytest.approx(-0.1, rel=1e-6)


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
def test_removed_rows_do_not_change_the_others(problems: tuple[Tensor, Tensor, Tensor], optimiser: Optimiser) -> None:
    scale, shift, start = problems
    alone = run(optimiser, scale[3:4], shift[3:4], start[3:4], steps=14)
    kept = torch.tensor([1, 3])
    stepper, z = optimiser.start(), start
    for i in range(14):
        z = next_of(stepper, scale, shift, z, i / 14)
        if i == 6:
            stepper.keep(kept)
            z, scale, shift = z[kept], scale[kept], shift[kept]
    torch.testing.assert_close(z[1:], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("after", [0, 1, 7])
def test_loaded_state_continues_with_the_same_steps(
    problems: tuple[Tensor, Tensor, Tensor], optimiser: Optimiser, after: int
) -> None:
    scale, shift, z = problems
    stepper, other = optimiser.start(), optimiser.start()
    for _ in range(after):
        z = next_of(stepper, scale, shift, z)
    other.load({name: t.clone() for name, t in stepper.get_state().items()})
    ours, theirs = z, z
    for _ in range(9):
        ours, theirs = next_of(stepper, scale, shift, ours), next_of(other, scale, shift, theirs)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("line_search", [False, True])
def test_lbfgs_stands_still_at_a_minimum(line_search: bool) -> None:
    stepper = LBFGS(line_search=line_search).start()
    z = torch.ones(2, 3)
    for _ in range(4):
        z = stepper.step(z, torch.zeros(2, 3), torch.zeros(2), 0.0)
    assert torch.equal(z, torch.ones(2, 3))


@pytest.mark.parametrize("line_search", [False, True])
def test_lbfgs_converges_for_a_tiny_loss(line_search: bool) -> None:
    """PyTorch's L-BFGS stops at once here, since its thresholds are absolute and this loss is scaled by 1e-12."""
    stretch = torch.tensor([1.0, 3.0, 10.0], dtype=torch.float64)
    z, stepper = torch.full((1, 3), 2.0, dtype=torch.float64), LBFGS(line_search=line_search).start()
    for _ in range(200):
        z = stepper.step(z, 2e-12 * stretch * z, 1e-12 * (stretch * z.square()).sum(dim=1), 0.0)
    assert z.abs().max() < 1e-3


def test_lbfgs_discards_a_history_that_points_uphill() -> None:
    stepper = LBFGS().start()
    assert isinstance(stepper, LBFGSStepper)
    z, up = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
    z = stepper.step(z, up, torch.ones(1), 0.0)
    z = stepper.step(z, 0.5 * up, torch.ones(1), 0.0)
    assert stepper.history.count.item() == 1
    stepper.history.steps.neg_()  # as rounding may do: the quadratic model is not convex now
    stepper.history.scale.neg_()
    after = stepper.step(z, up, torch.ones(1), 0.0)
    assert stepper.history.count.item() == 0
    assert after[0, 0] < z[0, 0]


def test_conjugate_gradients_solve_each_problem() -> None:
    rng = torch.Generator().manual_seed(0)
    roots = torch.randn(3, 8, 8, generator=rng, dtype=torch.float64)
    matrices, target = roots @ roots.mT, torch.randn(3, 8, generator=rng, dtype=torch.float64)
    target[2] = 0
    x, done = conjugate_gradients(lambda v: (matrices @ v[..., None])[..., 0], target, iterations=100, tolerance=1e-12)
    torch.testing.assert_close(x, torch.linalg.solve(matrices, target), rtol=1e-6, atol=1e-9)
    assert 8 <= done < 100


def test_phases_follow_their_relative_lengths() -> None:
    own = PhasedOptimiser(Adam(), (5, 5, 5), examples=1, lengths=(1, 2, 5))
    found = [own.locate(step / 16) for step in (0, 1, 2, 4, 5, 6, 11, 15)]
    assert [phase for phase, _ in found] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert [within for _, within in found] == pytest.approx([0, 0.5, 0, 0.5, 0.75, 0, 0.5, 0.9])
    equal = PhasedOptimiser(Adam(), (5, 5), examples=1)
    assert [equal.locate(step / 10)[0] for step in range(10)] == [0] * 5 + [1] * 5
