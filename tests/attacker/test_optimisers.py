"""Each batched optimiser does to every row what torch's own does to that row alone."""

import pytest
import torch
from torch import Tensor

from attacker.attacks.optimisers import LBFGS, Adam, Optimiser

PROBLEMS, SIZE = 5, 12


def curved(scale: Tensor, shift: Tensor, z: Tensor) -> Tensor:
    """A smooth function that is no quadratic, different for each row; (P,)."""
    return (scale * (z - shift) ** 2).sum(-1) + torch.cos(z).sum(-1) + 0.1 * (z[..., 1:] * z[..., :-1]).sum(-1)


@pytest.fixture
def problems() -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    draw = torch.rand(3, PROBLEMS, SIZE, generator=rng, dtype=torch.float64)
    return 0.6 + draw[0], 4 * draw[1] - 2, 6 * draw[2] - 3


def run(optimiser: Optimiser, scale: Tensor, shift: Tensor, z: Tensor, steps: int) -> Tensor:
    stepper = optimiser.start()
    for i in range(steps):
        leaf = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(curved(scale, shift, leaf).sum(), leaf)
        z = stepper.step(z, gradient, i / steps)
    return z


@pytest.mark.parametrize("history", [3, 100])
def test_lbfgs_is_torchs_own_for_each_row(problems: tuple[Tensor, Tensor, Tensor], history: int) -> None:
    scale, shift, start = problems
    ours = run(LBFGS(history=history, learning_rate=0.3), scale, shift, start, steps=12)
    for row in range(PROBLEMS):
        z = start[row].clone().requires_grad_()
        theirs = torch.optim.LBFGS([z], lr=0.3, max_iter=12, history_size=history, tolerance_grad=0, tolerance_change=0)

        def closure(row: int = row, z: Tensor = z, theirs: torch.optim.LBFGS = theirs) -> Tensor:
            theirs.zero_grad()
            loss = curved(scale[row], shift[row], z)
            loss.backward()
            return loss

        theirs.step(closure)
        torch.testing.assert_close(ours[row], z.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("signed", [False, True])
def test_adam_is_torchs_own(problems: tuple[Tensor, Tensor, Tensor], signed: bool) -> None:
    scale, shift, start = problems
    ours = run(Adam(learning_rate=0.05, signed=signed, decay_at=()), scale, shift, start, steps=20)
    z = start.clone().requires_grad_()
    theirs = torch.optim.Adam([z], lr=0.05)
    for _ in range(20):
        theirs.zero_grad()
        curved(scale, shift, z).sum().backward()
        if signed:
            assert z.grad is not None
            z.grad.sign_()
        theirs.step()
    torch.testing.assert_close(ours, z.detach(), rtol=1e-10, atol=1e-10)


def test_adam_takes_a_tenth_of_the_step_after_each_decay() -> None:
    z, gradient = torch.zeros(1, 1), torch.ones(1, 1)
    stepper = Adam(learning_rate=1.0, decay_at=(0.5,)).start()
    before = stepper.step(z, gradient, 0.49)
    after = stepper.step(z, gradient, 0.5)
    assert before.item() == pytest.approx(-1, rel=1e-6)
    assert after.item() == pytest.approx(-0.1, rel=1e-6)


@pytest.mark.parametrize("optimiser", [LBFGS(learning_rate=0.3), Adam(learning_rate=0.05)])
def test_rows_that_leave_do_not_change_the_others(problems: tuple[Tensor, Tensor, Tensor], optimiser: Optimiser) -> None:
    scale, shift, start = problems
    alone = run(optimiser, scale[3:4], shift[3:4], start[3:4], steps=14)
    kept = torch.tensor([1, 3])
    stepper, z = optimiser.start(), start
    for i in range(14):
        leaf = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(curved(scale, shift, leaf).sum(), leaf)
        z = stepper.step(z, gradient, i / 14)
        if i == 6:
            stepper.keep(kept)
            z, scale, shift = z[kept], scale[kept], shift[kept]
    torch.testing.assert_close(z[1:], alone, rtol=1e-9, atol=1e-9)


def test_lbfgs_stands_still_at_a_minimum() -> None:
    stepper = LBFGS().start()
    z = torch.ones(2, 3)
    for _ in range(4):
        z = stepper.step(z, torch.zeros(2, 3), 0.0)
    assert torch.equal(z, torch.ones(2, 3))
