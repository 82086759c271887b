"""Tests of projections onto balls, and of the method of Frank and Wolfe on quadratics whose minimum is known."""

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from attacker.attacks.optimisers.balls import FrankWolfe, project_onto_ball, project_onto_l1_ball
from attacker.attacks.optimisers.descent import Problems, descend
from attacker.attacks.optimisers.stopping import Stop

SCALES = torch.tensor([1.0, 3.0, 0.5, 2.0])


def draw(rows: int = 3, size: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def minimise(aim: Tensor, radius: float, steps: int) -> Tensor:
    """Return what Frank-Wolfe finds of sum(SCALES * (z - aim)^2) in the ball, (P, D)."""
    problems = Problems(
        evaluate=lambda z, rows, share: (2 * SCALES * (z - rows["aim"]), (SCALES * (z - rows["aim"]).square()).sum(dim=1)),
        per_problem={"aim": aim},
        project=lambda z: z,
        enough=torch.full((len(aim),), -1.0),
    )
    found = descend(torch.zeros_like(aim), problems, FrankWolfe(radius=radius), steps, Stop(patience=steps, decrease=0.0))
    return torch.stack(found.z)


def test_frank_wolfe_finds_the_minimum_of_a_quadratic_on_the_ball() -> None:
    """Minima outside the ball are compared with SciPy's on the sphere, those inside are the aim itself."""
    far, near = 4 * draw(), 0.2 * draw(seed=1)
    found = minimise(far, 1.5, 2000)
    for row, aim in zip(found, far, strict=True):
        reference = minimize(
            lambda z, aim=aim: float((SCALES.double().numpy() * (z - aim.double().numpy()) ** 2).sum()),
            torch.zeros(4).double().numpy(),
            constraints={"type": "ineq", "fun": lambda z: 1.5**2 - (z**2).sum()},
        )
        torch.testing.assert_close(row.double(), torch.from_numpy(reference.x), atol=5e-3, rtol=0)
    assert (found.norm(dim=1) <= 1.5 + 1e-5).all()
    torch.testing.assert_close(minimise(near, 1.5, 4000), near, atol=0.05, rtol=0)


def test_steps_stay_inside_keep_a_share_of_the_start_and_resume() -> None:
    settings, z, gradient = FrankWolfe(radius=2.0, delay=18), project_onto_ball(9 * draw(), 2.0), draw(seed=1)
    stepper = settings.start()
    first = stepper.step(z, gradient, torch.zeros(3), 0.0)
    torch.testing.assert_close(first, 0.9 * z - 0.2 * gradient / gradient.norm(dim=1, keepdim=True))
    again = settings.start()
    again.load(stepper.get_state())
    torch.testing.assert_close(
        again.step(first, gradient, torch.zeros(3), 0.0), stepper.step(first, gradient, torch.zeros(3), 0.0)
    )
    still = settings.start().step(torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3), 0.0)
    assert torch.equal(still, torch.zeros(3, 4))


@pytest.mark.parametrize("radius", [0.1, 1.0, 3.0])
def test_projections_are_the_nearest_points_of_their_balls(radius: float) -> None:
    """No other point of the ball is nearer, and points inside stay."""
    z, inside = 2 * draw(20, 7), torch.zeros(1, 7)
    inside[0, 0] = 0.09
    others = draw(500, 7, seed=1)
    for project, power in ((project_onto_ball, 2), (project_onto_l1_ball, 1)):
        found = project(z, radius)
        norms = found.norm(p=power, dim=1)
        assert (norms <= radius * (1 + 1e-5)).all()
        assert torch.equal(project(inside, radius), inside)
        trials = radius * others / others.norm(p=power, dim=1, keepdim=True)
        trials = torch.cat([trials, found.mean(dim=0, keepdim=True)])
        assert (torch.cdist(z, trials).amin(dim=1) >= (z - found).norm(dim=1) - 1e-5).all()
        # the angle at the projection between the point and every other point of the ball is at least 90 degrees
        assert float(torch.einsum("pd,qd->pq", z - found, trials).sub((z - found).mul(found).sum(1, keepdim=True)).max()) < 1e-4


def test_projection_onto_the_l1_ball_agrees_with_a_worked_example() -> None:
    found = project_onto_l1_ball(torch.tensor([[3.0, -1.0, 0.5], [0.0, 0.0, 0.0]]), 2.0)
    torch.testing.assert_close(found, torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    found = project_onto_l1_ball(torch.tensor([[2.0, -1.5, 0.1]]), 2.0)
    torch.testing.assert_close(found, torch.tensor([[1.25, -0.75, 0.0]]))
