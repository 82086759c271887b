"""The minimisation problem of `constant_modulus`: directions along which the whitened rows of a gradient take known values."""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from attacker.attacks.closed_form.linear.isolation import select_independent
from attacker.attacks.closed_form.linear.low_rank import Factors, whiten

STARTS = 640
"""Number of random starts of one round, shared by the templates."""
STEPS, STEP_SIZE = 250, 0.1
"""Iterations of gradient descent of one round, and its step size in whitened coordinates."""
CONSTRAINED_SHARE = 0.6
"""Share of the iterations that keep half of the neurons on, which excludes the solution q = 0."""
MIN_STRENGTH = 0.25
"""Quantile of |u| below which a neuron does not help to distinguish the two values."""
EQUAL_COSINE = 0.99
"""Cosine from which two results of the descent count as one."""
ZERO_NOISE = 20.0
"""Magnitude, in standard deviations of noise, up to which a value counts as zero. It is large since directions are noisy, too."""
ZERO_SCALES, MAX_FREE_SCALE = (0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5), 0.02
"""Successive scales of the robust loss that refines a direction, in units of the root mean square of its values: values beyond
the scale hardly count. At scales above MAX_FREE_SCALE only neurons count that the descent turned off, at the others all
neurons."""
INVERSE_SHIFT, INVERSE_ITERATIONS = 1e-15, 4
"""Regularisation of the inverse iteration, relative to the number of rows, and its number of steps."""
MAX_ZERO = 0.05
"""Largest magnitude that counts as zero, however large the noise."""
SPARE_ZEROS = 8
"""A direction is kept if it has at least this many zeros more than entries (the rank); fewer zeros may be a coincidence."""
MAX_UNEXPLAINED = 0.05
"""Largest part of the gradient along an example's direction, relative to its norm, that differs from W_2^T r for every r. It is a
tolerance for noise."""
MIN_SPREAD, NEAR_SPREAD = 0.2, 0.7
"""Smallest length of the random vector that a start adds to its centre, and factor of this vector in starts around a solution."""
MIN_INDEPENDENT, MIN_APPROXIMATE = 1e-5, 0.05
"""Smallest norm of the part of a unit direction outside the span of the others, for exact and for approximate directions."""


class Solutions(NamedTuple):
    """Unit directions in whitened coordinates, exact and approximate ones.

    The result of `join` is linearly independent and sorted: exact directions by descending number of zeros, then approximate ones
    by ascending loss. The result of `WhitenedProblem.solve` is neither.
    q: the directions (N, R). z: the results of the descent from which they were computed (N, R).
    label: the class whose template u was used (N,). zeros: number of zeros of an exact direction, above 0; for an approximate
           direction minus its loss, at most 0 (N,).
    """

    q: Tensor
    z: Tensor
    label: Tensor
    zeros: Tensor

    @staticmethod
    def none(problem: "WhitenedProblem") -> "Solutions":
        empty = problem.rows.new_zeros(0, problem.rows.shape[1])
        return Solutions(empty, empty, torch.zeros(0, dtype=torch.long, device=empty.device), empty.new_zeros(0))

    def join(self, other: "Solutions") -> "Solutions":
        """Return linearly independent solutions of both sets, at most R: exact ones first, those with the most zeros first."""
        both = Solutions(*(torch.cat(pair) for pair in zip(self, other, strict=True)))
        order = both.zeros.argsort(descending=True, stable=True)
        exact = order[both.zeros[order] > 0]
        exact = exact[select_independent(both.q[exact], minimum=MIN_INDEPENDENT)]
        order = torch.cat([exact, order[both.zeros[order] <= 0]])
        kept = order[select_independent(both.q[order], minimum=MIN_APPROXIMATE)] if len(exact) < both.q.shape[1] else exact
        kept = torch.cat([exact, kept[~torch.isin(kept, exact)]])[: both.q.shape[1]]
        return Solutions(*(values[kept] for values in both))

    def move(self, old: "WhitenedProblem", new: "WhitenedProblem") -> "Solutions":
        """Return the solutions in the coordinates of another problem with the same basis; the norms of the z are kept."""
        if old is new:
            return self
        change = torch.linalg.solve(new.back, old.back).T
        q, z = self.q @ change, self.z @ change
        length = self.z.norm(dim=1, keepdim=True)
        return self._replace(q=q / q.norm(dim=1, keepdim=True), z=z / z.norm(dim=1, keepdim=True) * length)

    @property
    def exact(self) -> "Solutions":
        """The solutions whose directions are exact."""
        return Solutions(*(values[self.zeros > 0] for values in self))


class WhitenedProblem(NamedTuple):
    """The M' rows of the gradient that are not zero, in whitened coordinates (their mean square is 1 along each direction).

    There is one row per hidden neuron. The factors (`Factors`) write each row as R coordinates times R orthonormal vectors. The
    template of a class, which is a label y, holds the value u = W_2^T (p - e_y) of each neuron that is on for an example with
    this label (`build_templates`).
    rows:   (M', R). u: (K, M'), the templates of K classes; classes whose template is 0 at all these rows are left out.
    back:   (R, R) matrix from whitened coordinates to the coordinates of the factors.
    noise:  (M',) standard deviation of the noise of each row in the coordinates of the factors.
    centre: (K, R) shortest z with mean(u * (rows @ z)) = 1/2. Each class's mean(u^2) is scaled to 1, so that this holds
            for a z at which rows @ z is u at neurons with half of the sum of u^2, and 0 at the others.
    normal: (K, R) `centre` as unit vectors.
    """

    rows: Tensor
    u: Tensor
    back: Tensor
    noise: Tensor
    centre: Tensor
    normal: Tensor

    @staticmethod
    def of(factors: Factors, templates: Tensor) -> "WhitenedProblem | None":
        live = factors.live
        u = templates[:, live]
        u = u[u.norm(dim=1) > 0]
        if int(live.sum()) < factors.rank + SPARE_ZEROS or not len(u) or not bool(torch.isfinite(u).all()):
            return None
        rows, back = whiten(factors)
        if not bool(torch.isfinite(back).all()):
            return None
        u = u / u.square().mean(dim=1, keepdim=True).sqrt()
        slope = u @ rows / len(rows)
        length = slope.norm(dim=1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
        return WhitenedProblem(rows, u, back, factors.noise[live], 0.5 * slope / length.square(), slope / length)

    def convert_to_original(self, q: Tensor) -> Tensor:
        """Return directions q (N, R) as unit vectors in the coordinates of the factors, one per column, (R, N)."""
        back = self.back @ q.T
        result: Tensor = back / back.norm(dim=0)
        return result

    def start(self, solutions: Solutions, rng: Generator) -> tuple[Tensor, Tensor]:
        """Return STARTS starts z (N, R) and the indices of their classes (N,), given the solutions so far.

        A start is `centre` of its class plus a random vector. If there are solutions, a third of the starts lie around solutions
        instead, since the examples of a class are similar, and a third have a random vector orthogonal to all solutions.
        """
        label = torch.arange(STARTS, device=self.u.device) % len(self.u)
        z = torch.randn(STARTS, self.rows.shape[1], generator=rng, dtype=torch.float32).to(self.rows)
        normal, centre = self.normal[label], self.centre[label]
        z = z - (z * normal).sum(dim=1, keepdim=True) * normal
        spread = (0.5 - centre.square().sum(dim=1)).clamp(min=MIN_SPREAD**2).sqrt()
        z = z / z.norm(dim=1, keepdim=True) * spread[:, None]
        start = centre + z
        if len(solutions.z):
            part = STARTS // 3
            near = torch.randint(len(solutions.z), (part,), generator=rng).to(label.device)
            start[:part] = solutions.z[near] + NEAR_SPREAD * z[:part]
            label[:part] = solutions.label[near]
            basis = torch.linalg.qr(solutions.q.T)[0]
            away = z[-part:] - (z[-part:] @ basis) @ basis.T
            away = away / away.norm(dim=1, keepdim=True).clamp(min=1e-12) * spread[-part:, None]
            start[-part:] = centre[-part:] + away
        return start, label

    def solve(self, start: tuple[Tensor, Tensor]) -> Solutions:
        """Return the directions to which descent leads, exact ones where possible, otherwise approximate ones.

        A direction is exact if it has at least R + SPARE_ZEROS zeros, and some W_2^T r explains the gradient elsewhere.
        start: starting points z (N, R) and the indices of their classes, as the method `start` returns them.
        """
        z, label = self._descend(*start)
        z = z.to(self.rows)
        kept = _find_distinct(z)
        z, label = z[kept], label[kept]
        q = self._solve_zeros(z, label)
        zero = self._find_zeros(q)
        zeros = zero.sum(dim=1).to(q.dtype)
        good = (zeros >= self.rows.shape[1] + SPARE_ZEROS) & torch.isfinite(q).all(dim=1)
        good = good & (self._measure_unexplained(q, zero) <= MAX_UNEXPLAINED)
        z_unit = z / z.norm(dim=1, keepdim=True)
        a = z @ self.rows.T - self.u[label] / 2
        loss = (a.square() - self.u[label].square() / 4).square().mean(dim=1)
        return Solutions(torch.where(good[:, None], q, z_unit), z, label, torch.where(good, zeros, -loss))

    def _descend(self, z: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        rows, half, normal = self.rows.float(), self.u[label].float() / 2, self.normal[label].float()
        z, modulus = z.float(), half.square()
        for step in range(STEPS):
            a = z @ rows.T - half
            slope = 4 * ((a.square() - modulus) * a) @ rows / len(rows)
            if step < CONSTRAINED_SHARE * STEPS:
                slope = slope - (slope * normal).sum(dim=1, keepdim=True) * normal
            z = z - STEP_SIZE * slope
        good = torch.isfinite(z).all(dim=1) & (z.norm(dim=1) > MIN_SPREAD / 2)
        return z[good], label[good]

    def _solve_zeros(self, z: Tensor, label: Tensor) -> Tensor:
        """Return unit directions q (N, R), in whitened coordinates, whose values `rows @ q` are near zero at many neurons.

        The weighted sum of squares of these values is minimised for one of `ZERO_SCALES` after the other, from large to small; a
        value far above the scale has a weight near 0. At scales above `MAX_FREE_SCALE`, only neurons count that z turns off.
        z: results of the descent, (N, R). label: the class of each, (N,).
        """
        if not len(z):
            return z
        u = self.u[label]
        strong = u.abs() >= u.abs().quantile(MIN_STRENGTH, dim=1, keepdim=True)
        off = ((z @ self.rows.T) / torch.where(u == 0, 1, u) < 0.5) & strong
        q = z / z.norm(dim=1, keepdim=True)
        q = self._minimise(q, off.to(q.dtype))
        for scale in ZERO_SCALES:
            noise = (q @ self.back.T).norm(dim=1, keepdim=True) * self.noise
            minimum = scale**2 + (4 * noise).square()
            weight = scale**2 / ((q @ self.rows.T).square() + minimum)
            q = self._minimise(q, weight * off if scale > MAX_FREE_SCALE else weight)
        return q

    def _minimise(self, q: Tensor, weight: Tensor) -> Tensor:
        """Return unit directions (N, R) with a small weighted sum of squares over the rows, by inverse iteration from q (N, R).

        weight: (N, M'), at most 1.
        """
        if not len(q):
            return q
        gram = torch.stack([(self.rows * problem_weight[:, None]).T @ self.rows for problem_weight in weight])
        gram = gram + torch.eye(q.shape[1], dtype=q.dtype, device=q.device) * (INVERSE_SHIFT * len(self.rows))
        factor = torch.linalg.cholesky_ex(gram)[0]
        for _ in range(INVERSE_ITERATIONS):
            q = torch.cholesky_solve(q[..., None], factor)[..., 0]
            q = q / q.norm(dim=1, keepdim=True)
        return q.nan_to_num(nan=0.0)

    def _measure_unexplained(self, q: Tensor, zero: Tensor) -> Tensor:
        """Return the share (N,) of the norm of the gradient along each direction q (N, R) that no W_2^T r explains.

        Only neurons that are on count. A single example's gradient is W_2^T r there, the gradient of a mixture of examples is
        not. The r considered are combinations of the vectors p - e_y. zero: mask (N, M') of neurons that are off.
        """
        on = (~zero).to(q.dtype)
        d = (q @ self.rows.T) * on
        gram = (self.u * on[:, None]) @ self.u.T
        fit = torch.linalg.pinv(gram, hermitian=True) @ (self.u @ d[..., None])
        left: Tensor = d - (fit[..., 0] @ self.u) * on
        share: Tensor = left.norm(dim=1) / d.norm(dim=1).clamp(min=torch.finfo(q.dtype).tiny)
        return share

    def _find_zeros(self, q: Tensor) -> Tensor:
        """Return a mask (N, M') of rows that are zero along q (N, R): within ZERO_NOISE standard deviations, at most MAX_ZERO."""
        noise = (q @ self.back.T).norm(dim=1, keepdim=True) * self.noise
        zero: Tensor = (q @ self.rows.T).abs() <= (ZERO_NOISE * noise).clamp(max=MAX_ZERO)
        return zero


def _find_distinct(z: Tensor) -> Tensor:
    """Return the indices of the z (N, R) whose cosine with each earlier one is at most `EQUAL_COSINE`; opposite ones differ."""
    unit = z / z.norm(dim=1, keepdim=True)
    return (~torch.tril(unit @ unit.T > EQUAL_COSINE, diagonal=-1).any(dim=1)).nonzero()[:, 0]
