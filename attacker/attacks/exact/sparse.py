"""Whole batches from the zeros that ReLU leaves in a gradient (the idea of SPEAR: Dimitrov et al. 2024, arXiv 2403.03945).

The rows of [dL/dW, dL/db] = D^T [X, 1] are known as L V with V a basis of their span, so that D^T = L Q and [X, 1] = Q^-1 V for
an unknown square Q. A neuron that is off for an example has a zero in its column of D: each column of Q is a direction that is
orthogonal to many rows of L. B - 1 rows that are all off for one example give it away; the right choice of rows is found by
chance. Here chance is helped: rows that are zero are off for all examples, and because the weights are known, they tell in which
direction of the span the examples lie, and so which other rows are likely to be off. This multiplies the hits hundredfold.
"""

from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from attacker.attacks.exact.lowrank import BEYOND, Factors

BATCH = 2048
"""Samples drawn at a time."""

BLUNTNESS = (1.0, 8.0)
"""How strongly samples follow what is likely: from near chance to nearly always the same rows, drawn anew for each."""

SPREAD = 0.5
"""How far apart the examples are taken to lie, as a share of how far their mean is from zero."""

FAR = 100.0
"""How many standard deviations of noise are taken for zero where all other values are much larger."""

NEAR = 1e-3
"""Of a unit row, how much of it along a sampled direction still counts as none; such a direction has the rounding of few rows."""

MOST = 0.05
"""The same where there is noise: more of it, and every direction has zeros."""

POOL = 200
"""Directions that are kept."""

ALIKE = 0.98
"""Share of neurons whose zeros must be those that the example itself would give."""

ROUNDS = 5
"""Of sharpening."""

SCREENED = 256
"""Directions of each batch of samples that are looked at closely."""

SAME = 1e-6
"""How far from 1 the cosine of two directions may be for them to be the same."""

VOTES = 8
"""Directions that unmixing one gives."""

SURE = 0.995
"""The same where nothing better needs to be looked for."""

FEW = 4
"""How many zeros a direction must have for them to say anything."""

SEPARABLE = 0.985
"""Share of neurons that must lie on the right side of some plane."""

PENALTIES = (5.0, 1.0, 20.0)
"""How many zeros a neuron on the wrong side outweighs, in orders that are tried one after the other."""

TRIALS = 60
"""Exchanges of directions that are tried after each batch of samples."""

INDEPENDENT = 1e-4
"""How much of a unit direction must lie outside of the span of others."""


class Directions(NamedTuple):
    """q: (R, R), one direction a column. agreement: (R,) share of neurons that it is on for exactly where its example is.

    samples: how many were drawn.
    """

    q: Tensor
    agreement: Tensor
    samples: int


def search(factors: Factors, forward: Tensor, rng: Generator, *, samples: int, constant: Tensor | None) -> Directions | None:
    """Directions of the R examples of a batch; None where there are not enough sparse ones.

    forward:  (M, R), [W, b] in the coordinates of the span: forward @ p is the pre-activation of the example p @ basis.
    constant: (R,), the last column of the basis, where the layer has a bias: it fixes scale and sign of each example.
    samples:  after how many to give up. The search ends early where all neurons agree.
    """
    space = _Space.of(factors)
    if len(space.rows) < space.rank + 2:
        return None
    pool, best = _Pool(space, factors, forward), None
    rounds = max(1, samples // BATCH)
    for done in range(1, rounds + 1):
        pool.add(_sampled(space, _likely(factors, forward, pool.on_for(), rng), rng))
        found = _judged(pool, factors, forward, constant)
        if found is None:
            continue
        if bool((found.agreement < SURE).any()):
            pool.unmix(found)
            found = _judged(pool, factors, forward, constant) or found
        if best is None or float(found.agreement.sum()) >= float(best.agreement.sum()):
            best = found._replace(samples=done * BATCH)
        if bool((best.agreement >= SURE).all()):
            break
    return best


class Pattern(NamedTuple):
    """Of K directions: on (M, K), which neurons are not zero in them. told: (M, K), of which neurons noise lets this be told."""

    on: Tensor
    told: Tensor

    def __getitem__(self, columns: Any) -> "Pattern":
        return Pattern(self.on[:, columns], self.told[:, columns])


def pattern(q: Tensor, factors: Factors) -> Pattern:
    """The zeros of directions q (R, K). A zero is told where noise is small beside what the direction has elsewhere."""
    d, noise = (factors.coordinates @ q).abs(), factors.noise[:, None] * q.norm(dim=0)
    on = d > BEYOND * noise
    typical = (d * on).sum(dim=0) / on.sum(dim=0).clamp(min=1)
    on = d > _nothing(noise, typical)
    return Pattern(on, on | (BEYOND * noise < typical / 10))


def _nothing(noise: Tensor, typical: Tensor | float) -> Tensor:
    """Up to where a value is taken for zero. Rounding is not the same in all directions: where it is far from all values, more of it."""
    return torch.maximum(BEYOND * noise, torch.minimum(FAR * noise, NEAR * torch.as_tensor(typical).to(noise)))


def agreement(q: Tensor, seen: Pattern, forward: Tensor, constant: Tensor | None) -> Tensor:
    """(R,) of each direction of q (R, R), the share of neurons that are zero in it exactly where its example turns them off.

    0 where that can be told of few neurons, or where all are on, which says nothing.
    """
    p, info = torch.linalg.inv_ex(q)
    if int(info) or not bool(torch.isfinite(p).all()):
        return torch.zeros(q.shape[1], dtype=q.dtype, device=q.device)
    z = forward @ p.T
    enough = ((seen.told & ~seen.on).sum(dim=0) >= FEW) & (seen.on.sum(dim=0) >= 1)
    count = seen.told.sum(dim=0).clamp(min=1)
    if constant is not None:
        return ((seen.on == (z * torch.sign(p @ constant) > 0)) & seen.told).sum(dim=0) / count * enough
    both = torch.stack([((seen.on == (side * z > 0)) & seen.told).sum(dim=0) for side in (1, -1)])
    return both.amax(dim=0) / count * enough


class _Space(NamedTuple):
    """Rows that say something, as unit vectors (M', R) in coordinates in which they lie evenly in all directions.

    back:  (R, R) takes a direction to the coordinates of the factors, where a row's noise is the same in all directions.
    level: (M',) that noise, in units of the row.
    """

    rows: Tensor
    back: Tensor
    level: Tensor
    live: Tensor

    @property
    def rank(self) -> int:
        return self.rows.shape[1]

    @staticmethod
    def of(factors: Factors) -> "_Space":
        rows, noise = factors.coordinates[factors.live], factors.noise[factors.live]
        rank = rows.shape[1]
        eye = torch.eye(rank, dtype=rows.dtype, device=rows.device)
        length, back = rows.norm(dim=1), eye
        unit = rows / length[:, None]
        for _ in range(10):  # Tyler's estimate of the scatter
            scatter = unit.T @ unit * (rank / max(len(unit), 1))
            values, vectors = torch.linalg.eigh(scatter)
            back = back @ vectors * values.clamp(min=float(values[-1]) * 1e-14).rsqrt()
            unit = rows @ back
            length = unit.norm(dim=1)
            unit = unit / length[:, None]
        return _Space(unit, back, noise / length, factors.live)

    def tolerance(self, q: Tensor) -> Tensor:
        """(K, M') up to where rows have nothing but noise along unit directions q (K, R)."""
        return _nothing(self.noise_along(q), self.rank**-0.5)

    def noise_along(self, q: Tensor) -> Tensor:
        """(K, M') standard deviation of the noise of unit rows along unit directions q (K, R)."""
        return (q @ self.back.T).norm(dim=1)[:, None] * self.level[None]


def _likely(factors: Factors, forward: Tensor, on: Tensor, rng: Generator) -> Tensor:
    """(BATCH, M') how likely live rows are on, on a scale of its own, seen from as many points around the examples' mean.

    By ridge logistic regression, on the weights, of which rows are on for some example, or of how many of the examples found.
    on: (M, K), of these.
    """
    unit = _unit(forward)
    share = factors.live.to(unit.dtype)
    if on.shape[1]:
        share = share * (0.1 + 0.8 * on.to(unit.dtype).mean(dim=1))
    mean = _logistic(unit, share[:, None], torch.ones_like(share[:, None]))[0]
    around = torch.randn(BATCH, len(mean), generator=rng, dtype=unit.dtype).to(unit.device)
    around = around / around.norm(dim=1, keepdim=True) * torch.rand(BATCH, 1, generator=rng, dtype=unit.dtype).to(unit.device)
    likely = (mean + 2 * SPREAD * mean.norm() * around) @ unit[factors.live].T
    centred = likely - likely.mean(dim=1, keepdim=True)
    return centred / centred.std(dim=1, keepdim=True).clamp(min=torch.finfo(unit.dtype).tiny)


def _unit(forward: Tensor) -> Tensor:
    return forward / forward.norm(dim=1, keepdim=True).clamp(min=torch.finfo(forward.dtype).tiny)


def _logistic(x: Tensor, y: Tensor, weight: Tensor, ridges: tuple[float, ...] = (0.05,)) -> Tensor:
    """(K, R) weights of K ridge logistic regressions of y (M, K) in [0, 1] on x (M, R), by Newton's method.

    weight: (M, K), of each row in each. ridges: one after the other, each from where the last one ended.
    """
    w = x.new_zeros(y.shape[1], x.shape[1])
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    for ridge in ridges:
        for _ in range(6):
            s = torch.sigmoid(w @ x.T)
            hessian = (x.T * (s * (1 - s) * weight.T)[:, None]) @ x + ridge * eye
            slope = (weight.T * (y.T - s)) @ x - ridge * w
            w = w + torch.linalg.solve(hessian, slope[..., None])[..., 0]
    return w


def _separable(seen: "Pattern", forward: Tensor) -> Tensor:
    """(K,) of each direction, how well a plane tells the neurons that are on in it from the others: 1 where it is of an example.

    A neuron is on where w x + b > 0, and all w and b are known: what is on for one example lies on one side of a plane. What is on
    for either of two, as in a mixture of their directions, does not. The mean of the shares that are right, among both kinds.
    """
    on, off = seen.on, seen.told & ~seen.on
    x, both = _unit(forward), seen.told.to(forward.dtype)
    enough = (on.sum(dim=0) > 0) & (off.sum(dim=0) >= FEW)
    side = x @ _logistic(x, on.to(x.dtype), both, ridges=(1.0, 0.1, 0.01, 1e-3, 1e-4)).T > 0
    return (_balanced(side, on, off) * enough).nan_to_num(nan=0.0)


def _balanced(side: Tensor, on: Tensor, off: Tensor) -> Tensor:
    right = (side & on).sum(dim=0) / on.sum(dim=0).clamp(min=1) + (~side & off).sum(dim=0) / off.sum(dim=0).clamp(min=1)
    return right / 2


def _sampled(space: _Space, likely: Tensor, rng: Generator) -> Tensor:
    """(K, R) unit directions, each orthogonal to R - 1 independent rows drawn without replacement, those likely off first."""
    low, high = BLUNTNESS
    drawn = torch.rand(len(likely), 1, generator=rng, dtype=likely.dtype).to(likely.device)
    sharp = low * (high / low) ** drawn
    uniform = torch.rand(likely.shape, generator=rng, dtype=likely.dtype).to(likely.device)
    order = (-(-uniform.clamp(min=1e-300).log()).log() - sharp * likely).topk(min(4 * space.rank, likely.shape[1]), dim=1).indices
    return _orthogonal(space.rows, order)


def _orthogonal(rows: Tensor, order: Tensor) -> Tensor:
    """Of each row of `order` (N, K), the direction that its first R - 1 independent rows leave; none where they leave several.

    Rows that depend on those before them are free: they are skipped.
    """
    count, rank = len(order), rows.shape[1]
    left = torch.eye(rank, dtype=rows.dtype, device=rows.device).repeat(count, 1, 1)
    taken = torch.zeros(count, dtype=torch.long, device=rows.device)
    for k in range(order.shape[1]):
        new = left @ rows[order[:, k], :, None]
        power = new.square().sum(dim=(1, 2))
        take = (power > NEAR**2) & (taken < rank - 1)
        new = new * torch.where(take, power.clamp(min=NEAR**2).rsqrt(), 0)[:, None, None]
        left = torch.baddbmm(left, new, new.mT, alpha=-1)
        taken += take
        if bool((taken == rank - 1).all()):
            break
    left = left[taken == rank - 1]
    column = left.diagonal(dim1=1, dim2=2).argmax(dim=1)
    q = left[torch.arange(len(left), device=rows.device), :, column]
    return q / q.norm(dim=1, keepdim=True)


class _Pool:
    """Directions with many zeros, without doubles: those first whose zeros are most nearly those of an example."""

    def __init__(self, space: _Space, factors: Factors, forward: Tensor) -> None:
        self.space, self.factors, self.forward = space, factors, forward
        self.q = space.rows.new_zeros(0, space.rank)
        self.off = torch.zeros(0, len(space.rows), dtype=torch.bool, device=space.rows.device)
        self.score = space.rows.new_zeros(0)

    def add(self, q: Tensor) -> None:
        off = self.off_in(q, NEAR)
        count = off.sum(dim=1)
        order = count.argsort(descending=True, stable=True)
        order = order[count[order] >= self.space.rank + 2]
        q, off = q[order], off[order]
        fresh = _first_of_alike(torch.cat([self.off, off]))[len(self.off) :]
        q, off = q[fresh], off[fresh]
        if len(q):
            likeness = self._screened(off)
            likeness[: SCREENED // 2] += 1  # of those with most zeros, all
            promising = likeness.topk(min(SCREENED, len(off))).indices.sort().values
            self._take(self.sharpened(q[promising]))

    def _screened(self, off: Tensor) -> Tensor:
        """(K,) a cheap likeness of `_separable`, by linear regression, which all directions share."""
        on = torch.zeros(len(self.space.live), len(off), dtype=torch.bool, device=off.device)
        on[self.space.live] = ~off.T
        x = _unit(self.forward)
        plane = torch.linalg.lstsq(x, 2.0 * on.to(x.dtype) - 1).solution
        return _balanced(x @ plane > 0, on, ~on)

    def _take(self, q: Tensor) -> None:
        score = _separable(pattern(self.original(q), self.factors), self.forward)
        off = self.off_in(q, 1e-9)
        q, off, score = torch.cat([self.q, q]), torch.cat([self.off, off]), torch.cat([self.score, score])
        order = self._ranked(off, score, PENALTIES[0])
        order = order[_first_of_same(q[order])][:POOL]
        self.q, self.off, self.score = q[order], off[order], score[order]

    def unmix(self, found: Directions) -> None:
        """Take in, for each direction that does not agree, what is left of it without a share of another one.

        The share is the one that leaves most zeros: each row votes for the share that would make it one.
        """
        q = torch.linalg.solve(self.space.back, found.q).T
        q = q / q.norm(dim=1, keepdim=True)
        along = q @ self.space.rows.T
        for i in (found.agreement < SURE).nonzero()[:, 0].tolist():
            others = [k for k in range(len(q)) if k != i]
            share = along[i] / torch.where(along[others] == 0, 1, along[others])
            trial = q[i] - share[..., None] * q[others, None]
            trial = trial.flatten(0, 1) / trial.flatten(0, 1).norm(dim=1, keepdim=True).clamp(min=1e-300)
            trial = trial[trial.isfinite().all(dim=1)]
            off = self.off_in(trial, NEAR)
            most = off.sum(dim=1).topk(min(4 * VOTES, len(off))).indices
            trial, off = trial[most], off[most]
            self._take(self.sharpened(trial[_first_of_alike(off)][:VOTES]))

    def original(self, q: Tensor) -> Tensor:
        """(R, K) unit directions in the coordinates of the factors, of directions (K, R)."""
        back = self.space.back @ q.T
        return back / back.norm(dim=0)

    def off_in(self, q: Tensor, least: float) -> Tensor:
        """(K, M') which rows are zero in q (K, R), by noise or within `least`."""
        return (q @ self.space.rows.T).abs() <= self.space.tolerance(q).clamp(min=least).clamp(max=MOST)

    def sharpened(self, q: Tensor) -> Tensor:
        """(K, R) each direction to the precision of the data: what its zeros agree on, so that a row that is nearly zero has no say."""
        rows, rank = self.space.rows, self.space.rank
        for _ in range(ROUNDS):
            noise = self.space.noise_along(q)
            size = (q @ rows.T).abs()
            off = size <= self.space.tolerance(q).clamp(min=NEAR).clamp(max=MOST)
            middle = (rank - 1 + (off.sum(dim=1) - rank + 1).clamp(min=1) // 2).clamp(max=len(rows) - 1)  # of those not sampled
            scale = size.sort(dim=1).values.gather(1, middle[:, None])
            least = torch.maximum(scale, noise).clamp(min=torch.finfo(q.dtype).eps)
            weight = off / (size.square() + least.square())
            weight = weight / weight.amax(dim=1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
            scatter = (rows.T * weight[:, None]) @ rows
            found = torch.linalg.eigh(scatter)[1][:, :, 0]
            q = torch.where((off.sum(dim=1) >= rank)[:, None], found, q)
        return q

    def on_for(self) -> Tensor:
        """(M, K) which neurons are on in the directions that are surely those of examples."""
        sure = self.score[: self.space.rank] >= SEPARABLE
        return pattern(self.original(self.q[: self.space.rank][sure]), self.factors).on

    def chosen(self, penalty: float) -> list[int] | None:
        """R independent directions, the first ones in the order of a penalty; None where there are fewer."""
        found: list[int] = []
        left = torch.eye(self.space.rank, dtype=self.q.dtype, device=self.q.device)
        for i in self._ranked(self.off, self.score, penalty).tolist():
            new = left @ self.q[i]
            if float(new.norm()) > INDEPENDENT:
                left = left - torch.outer(new, new) / new.square().sum()
                found.append(i)
            if len(found) == self.space.rank:
                return found
        return None

    def _ranked(self, off: Tensor, score: Tensor, penalty: float) -> Tensor:
        wrong = (1 - score) * len(self.space.live)
        return (off.sum(dim=1) - penalty * wrong).argsort(descending=True, stable=True)


def _first_of_alike(off: Tensor) -> Tensor:
    """(K,) whether a direction is the first of those with much the same zeros."""
    z = off.to(torch.float32)
    common, size = z @ z.T, z.sum(dim=1)
    alike = common > 0.98 * (size[:, None] + size[None] - common).clamp(min=1)
    return ~torch.tril(alike, diagonal=-1).any(dim=1)


def _first_of_same(q: Tensor) -> Tensor:
    """(K,) whether a unit direction is the first of those that are the same but for their sign."""
    return ~torch.tril((q @ q.T).abs() > 1 - SAME, diagonal=-1).any(dim=1)


def _judged(pool: _Pool, factors: Factors, forward: Tensor, constant: Tensor | None) -> Directions | None:
    """The R directions of the pool that agree best with their own examples; None where there are not so many.

    Three choices of the first independent ones, in orders that trust zeros more or less; in the best of them, those that do not
    agree are exchanged as long as that helps.
    """
    q = pool.original(pool.q)
    seen = pattern(q, factors)
    best: tuple[float, list[int], Tensor] | None = None
    for penalty in PENALTIES:
        chosen = pool.chosen(penalty)
        if chosen is None:
            return None
        score = agreement(q[:, chosen], seen[chosen], forward, constant)
        if best is None or float(score.sum()) > best[0]:
            best = (float(score.sum()), chosen, score)
    assert best is not None
    total, chosen, score = best
    bad = (score < ALIKE).nonzero()[:, 0].tolist()
    spare = [i for i in range(len(pool.q)) if i not in chosen]
    for other, place in [(other, place) for other in spare for place in bad][:TRIALS]:
        trial = [other if k == place else i for k, i in enumerate(chosen)]
        new = agreement(q[:, trial], seen[trial], forward, constant)
        if float(new.sum()) > total + 1e-9:
            total, chosen, score = float(new.sum()), trial, new
    return Directions(q[:, chosen], score, 0)
