"""Inputs of a first linear layer in closed form, for one example or a whole batch.

    dL/dW = D^T X,  dL/db = D^T 1

with X the inputs (B, F), and D = dL/dz (B, width) the gradient at the layer's outputs. Three methods, by what is known:

ratio:             for one example, the ratio of the two gradients (Aono et al. 2017; Phong et al. 2018).
isolated:          for each example that is the only one to activate some neuron followed by a ReLU.
sparse directions: for all examples, from the zeros that ReLU causes in D (Dimitrov et al. 2024). The directions are found by
                   random samples; in large batches of a network with one hidden layer, by the values that D takes.
"""

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Generator, Tensor

from attacker.attacks.closed_form.linear.constant_modulus import build_templates, find_directions
from attacker.attacks.closed_form.linear.isolation import (
    Groups,
    estimate_rounding,
    find_mixtures,
    group_parallel_rows,
    select_independent,
)
from attacker.attacks.closed_form.linear.known_examples import find_beside
from attacker.attacks.closed_form.linear.low_rank import Factors, factorise, polish
from attacker.attacks.closed_form.linear.sparse import MIN_AGREEMENT, Directions, search
from attacker.attacks.closed_form.linear.zeros import find_pattern, match_kinks, measure_agreement
from attacker.attacks.confidence.eight_bit import LEVELS, is_eight_bit
from attacker.attacks.networks.chain import Chain, Layer
from defenses.base import Tensors

MAX_SAMPLES = 2**15
"""Largest number of random samples in the search for sparse directions. Batches above `sparse.LARGE_BATCH` draw fewer."""

MIN_MODULUS_BATCH, MAX_SAMPLED_BATCH = 25, 40
"""Smallest batch in which directions are searched by known values of the gradient (`constant_modulus`) first, and largest one in
which sampling is tried if that fails. In larger batches a sample hardly ever holds only neurons that are off for one example."""

MAX_ALTERNATIONS = 6
"""Number of alternations between fitting zeros to examples and examples to zeros."""

MAX_RESIDUAL = 3.0
"""Largest residual of an explained gradient, in standard deviations of its noise."""

MIN_ALONE_NEURONS = 3
"""Smallest number of neurons whose parallel gradients are evidence that a batch's gradient is that of one example."""

SINGLE_NEURON_CERTAINTY = 0.25
"""Certainty of an example that is computed from a single neuron."""


@dataclass(frozen=True, kw_only=True)
class LinearAnswer:
    """The examples found in a batch.

    x:         (found, F) normalised inputs of the layer; unit vectors if the layer has no bias.
    d:         (found, width) each example's part of the gradient of the mean loss at the pre-activations; zeros where it is not
               known. If x are unit vectors, d is multiplied by the norms of the inputs.
    certainty: (found,) in [0, 1], a heuristic confidence that the example is right.
    rank:      rank of the gradient, the number of distinct examples that it shows; 0 if unknown.
    how:       name of the method, see the module: "ratio", "isolated" or "sparse directions"; "" if none were found.
    note:      if no examples were found, the reason. Otherwise remarks on the result, such as how many are missing, or "".
    scaled:    whether the norm of x is known; False if x are unit vectors.
    ambiguous: whether the gradient of several examples may have the same form as the gradient of the single one that was found.
    """

    x: Tensor
    d: Tensor
    certainty: Tensor
    rank: int
    how: str
    note: str
    scaled: bool = True
    ambiguous: bool = False

    @property
    def found(self) -> int:
        return len(self.x)


def recover_linear(
    chain: Chain,
    weights: Tensors,
    gradient: Tensors,
    examples: int | None,
    rng: Generator,
    *,
    bounds: tuple[Tensor, Tensor] | None = None,
    samples: int = MAX_SAMPLES,
) -> LinearAnswer:
    """Recover the examples of one batch from the gradient of the chain's first layer, computing in float64.

    weights, gradient: by name, of one observation. examples: number of examples in the batch, or None if unknown.
    bounds:  lowest and highest possible normalised inputs, of any shape with F values. Without them, an example that was computed
             from a single neuron is not returned. If they have the shape (C, H, W), examples are also recognised by 8-bit values.
    samples: largest number of random samples in the search for sparse directions.
    A gradient that is zero or not finite gives an answer without examples, and no error.
    """
    layer = chain.layers[0]
    if (reason := _explain_refusal(layer, gradient)) is not None:
        return _build_empty_answer(layer, reason)
    task = _Task(chain, weights, gradient, bounds)
    if examples == 1:
        return replace(task.recover_single(1, ""), ambiguous=task.shares_direction)
    factors = factorise(task.rows, examples)
    if factors is not None and factors.rank == 1:
        if task.shares_direction:
            return _build_empty_answer(layer, _explain_shared_direction(layer, examples), rank=1)
        return task.recover_alone(examples)
    if layer.activation.name != "relu":
        what = "no activation" if layer.activation.name == "identity" else layer.activation.name
        return _build_empty_answer(
            layer,
            f"layer {layer.name or 'one'} is followed by {what}, which causes no zeros in the gradient, and without zeros the "
            "examples of a batch cannot be separated: any answer would be a mixture of them",
            rank=factors.rank if factors else 0,
        )
    if factors is None or factors.saturated:
        return task.recover_isolated(examples, _explain_missing_rank(task.rows, examples, factors))
    return task.recover_batch(factors, examples, rng, samples)


class _Task:
    """The recovery of one batch: the gradient and weights of its first layer, each with the bias, if any, as a last column."""

    def __init__(self, chain: Chain, weights: Tensors, gradient: Tensors, bounds: tuple[Tensor, Tensor] | None) -> None:
        layer = self.layer = chain.layers[0]
        self.rows = _augment(layer, gradient)
        self.templates = build_templates(chain, weights, bounds)
        self.weight = _augment(layer, weights)
        self.bounds = None if bounds is None else tuple(b.double().flatten() for b in bounds)
        self.is_image = bounds is not None and bounds[0].ndim == 3
        """Whether the bounds have the shape of an image; rows of a table may have 8-bit values by chance."""
        self.biased = layer.bias is not None
        self.uniform = any(later.shape[0] <= 2 for later in chain.layers[1:])
        """Whether each example's row of D may be determined by a sign and its zeros. Neurons that are on for the same examples
        then have parallel rows, so that parallel rows are not evidence of a single example."""
        linear, narrow = layer.activation.name == "identity", min(each.shape[0] for each in chain.layers) <= 2
        self.shares_direction = linear or (narrow and layer.activation.name == "relu")
        """Whether different examples may have parallel rows of D, so that a gradient of rank one may be of several examples:
        their errors at the outputs are parallel if there are at most two outputs, or if all examples have one label and the
        network is untrained. Behind ReLU they stay parallel for examples that turn on the same neurons; other activations change
        them."""

    def recover_single(self, rank: int, note: str) -> LinearAnswer:
        """Return the input of one example, x = sum_j gb_j gW_j / sum_j gb_j^2, the least-squares solution of dL/dW = gb x^T.

        gW_j and gb_j are the gradients of the weights and of the bias of neuron j. Entries of gW that are zero are left out of
        both sums, since they may not have been sent. If gb is zero, the answer has no example.
        Without a bias, x is the unit vector of the best rank-one fit of dL/dW; if a ReLU follows, its sign is chosen so that x
        turns on the neurons with a gradient. rank, note: copied to the answer.
        """
        scale = self.rows.abs().amax()
        rows = self.rows / scale
        if not self.biased:
            left, value, right = torch.linalg.svd(rows, full_matrices=False)
            x, d = right[:1], (left[:, :1] * value[0] * scale).T
            side = 1.0 if float((self.weight @ x[0]) @ d[0].abs()) >= 0 else -1.0  # neurons with a gradient are on
            x, d = (side * x, side * d) if self.layer.activation.name == "relu" else (x, d)
            explained = value[:1].square() / value.square().sum()
            return LinearAnswer(x=x, d=d, certainty=explained, rank=rank, how="ratio", note=_join(note, _UNSCALED), scaled=False)
        d, seen = rows[:, -1], rows[:, :-1] != 0
        power = d.square() @ seen.to(d.dtype)
        if not bool((d != 0).any()):
            return _build_empty_answer(
                self.layer, "the gradient of the bias, by which the weight gradient is divided, is zero", rank=rank
            )
        x = torch.where(power > 0, d @ rows[:, :-1] / power.clamp(min=torch.finfo(d.dtype).tiny), 0)
        missed = ((rows[:, :-1] - torch.outer(d, x)) * seen).square().sum() / rows[:, :-1].square().sum().clamp(min=1e-300)
        unsent = seen.any(dim=0)[None] & seen.any(dim=1)[:, None] & ~seen
        lost = int((power <= 0).sum()) if bool(unsent.any()) else 0
        said = f"{lost:,} of the example's {len(x):,} values are unknown: their gradient is zero or was not sent" if lost else ""
        certainty = (1 - lost / len(x)) * (1 - missed).clamp(0, 1).reshape(1)
        return LinearAnswer(
            x=x[None], d=scale * d[None], certainty=certainty, rank=rank, how="ratio", note=_join(note, said)
        )  # fmt: skip

    def recover_alone(self, examples: int | None) -> LinearAnswer:
        """Return the input of one example that seems to make up the whole gradient of a batch, which has rank one.

        Fewer than `MIN_ALONE_NEURONS` neurons with a gradient are no evidence of a single example: one row always has rank one.
        """
        found = self.recover_single(1, _note_single(examples))
        few = int((self.rows.norm(dim=1) > 0).sum()) < MIN_ALONE_NEURONS
        return replace(found, certainty=found.certainty.clamp(max=SINGLE_NEURON_CERTAINTY)) if few else found

    def recover_batch(self, factors: Factors, examples: int | None, rng: Generator, samples: int) -> LinearAnswer:
        """Recover all examples of a batch, from isolated neurons if each example has some, otherwise from sparse directions.

        If neither succeeds, return the examples that could be recovered.
        """
        forward, constant = self.weight @ factors.basis.T, factors.basis[:, -1] if self.biased else None
        groups = group_parallel_rows(factors.coordinates, factors.noise, factors.live)
        groups = self._mark_mixtures(groups, groups.directions @ factors.basis)
        found = _combine_groups(groups, factors, forward, constant)
        if found is not None and bool((found.agreement >= MIN_AGREEMENT).all()):
            return self._recover_all(factors, found, examples, "isolated")
        found = self._search(factors, forward, rng, samples, constant)
        whole = None if found is None else self._recover_all(factors, found, examples, "sparse directions")
        if whole is not None and whole.found == factors.rank:
            return whole
        if (beside := self._search_beside(groups, factors, forward, rng, samples, constant)) is not None:
            joined = self._recover_all(factors, beside, examples, "sparse directions")
            if joined.found == factors.rank:
                return joined
        alone = self._recover_some(
            groups.directions @ factors.basis, groups, factors.rank, examples, _note_fewer(factors.rank, examples)
        )
        sure = int((alone.certainty > SINGLE_NEURON_CERTAINTY).sum())
        return alone if whole is None or whole.found < sure or (whole.found == 0 and alone.found > 0) else whole

    def _search(
        self, factors: Factors, forward: Tensor, rng: Generator, samples: int, constant: Tensor | None
    ) -> Directions | None:
        """Search for the directions of all R examples of the batch (see `Directions`); return None if fewer are found.

        Batches below MIN_MODULUS_BATCH, and networks without templates (known values that the gradient takes), are searched by
        sampling (`sparse`). Others are searched by the templates, and by sampling if that fails, up to MAX_SAMPLED_BATCH.
        forward: (M, R), the layer's [W, b] in the coordinates of the basis. constant: (R,), the last column of the basis if the
        layer has a bias; else None. samples: largest number of samples.
        """
        if self.templates is None or factors.rank < MIN_MODULUS_BATCH:
            return search(factors, forward, rng, samples=samples, constant=constant)
        found = find_directions(factors, self.templates, forward, rng, constant=constant)
        if found is not None or factors.rank > MAX_SAMPLED_BATCH:
            return found
        return search(factors, forward, rng, samples=samples, constant=constant)

    def _search_beside(
        self, groups: Groups, factors: Factors, forward: Tensor, rng: Generator, samples: int, constant: Tensor | None
    ) -> Directions | None:
        """Search for the directions of all examples, given those that are recovered from groups of parallel rows alone.

        Returns None if no example is recovered from a group alone, if the directions of the remaining examples are not found, or
        without a bias. Only examples count whose values are those of an 8-bit image, and, unless `uniform` is set, those whose
        group has more rows than chance explains (`Groups.confirmed`). Values of an 8-bit image are rounded to its levels.
        groups: in the coordinates of the basis. The other arguments are as in `_search`.
        """
        if constant is None:
            return None
        directions = groups.directions @ factors.basis
        x, fits = self._compute_inputs(directions)
        stored = fits & self._is_eight_bit(x)
        sure = stored | (groups.confirmed & fits & (not self.uniform))
        if self.bounds is not None and bool(stored.any()):
            low, high = self.bounds
            x = torch.where(stored[:, None], low + (LEVELS * (x - low) / (high - low)).round() / LEVELS * (high - low), x)
        known = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)[sure] @ factors.basis.T

        def find(factors: Factors, forward: Tensor, constant: Tensor) -> Directions | None:
            return self._search(factors, forward, rng, samples, constant)

        return find_beside(factors, known, forward, constant, find)

    def recover_isolated(self, examples: int | None, note: str) -> LinearAnswer:
        """Recover the examples that are the only ones to activate some neuron. The gradient's rank need not be known.

        note: remark that is copied to the answer.
        """
        groups = group_parallel_rows(self.rows, estimate_rounding(self.rows), self.rows.norm(dim=1) > 0)
        groups = self._mark_mixtures(groups, groups.directions)
        return self._recover_some(groups.directions, groups, 0, examples, note)

    def _mark_mixtures(self, groups: Groups, directions: Tensor) -> Groups:
        """Return the groups with `mixed` set, for confirmed ones whose input lies between the inputs of other confirmed groups.

        Groups whose input has the values of an 8-bit image are not marked.
        directions: directions of the groups as rows of the gradient, (K, F'), see `_recover_some`. Without a bias nothing is
        marked, since the norm of an input is then not known.
        """
        x, fits = self._compute_inputs(directions)
        mixed = torch.zeros_like(fits)
        if self.biased:
            known = (groups.confirmed & fits).nonzero()[:, 0]
            mixed[known] = find_mixtures(torch.cat([x[known], torch.ones_like(x[known, :1])], dim=1))
            mixed &= ~self._is_eight_bit(x)
        return replace(groups, mixed=mixed)

    def _recover_some(self, directions: Tensor, groups: Groups, rank: int, examples: int | None, note: str) -> LinearAnswer:
        """Recover examples from K groups of parallel rows; at most `rank` and `examples` of them, if these are known.

        Only possible inputs (`_compute_inputs`) of groups with linearly independent directions are used. Inputs whose values are
        those of an 8-bit image come first. Next come the groups in `Groups.confirmed`, which have more rows than chance explains;
        if `uniform` is set, these groups count as others. Others are used only if their input lies within the known bounds of the
        data, if no other row is nearly parallel, and if the group is not known to be a mixture of examples (`Groups.mixed`).
        directions: directions of the groups as rows of the gradient, (K, F'), with F' = F + 1 if there is a bias, else F.
        rank: rank of the gradient; 0 if unknown. note: remark that is copied to the answer.
        """
        x, fits = self._compute_inputs(directions)
        stored = fits & self._is_eight_bit(x)
        mixed = torch.zeros_like(stored) if groups.mixed is None else groups.mixed
        first = torch.argsort(stored.long() - mixed.long(), descending=True, stable=True)
        chosen = first[select_independent(directions[first])]
        x, fits, stored = x[chosen], fits[chosen], stored[chosen]
        several = groups.confirmed[chosen] & fits & ~stored & (not self.uniform)
        lone = ~stored & ~several & fits & self._is_within_bounds(x) & ~(groups.crowded | mixed)[chosen]
        most = min(rank or len(x), examples or len(x))
        order = torch.cat([mask.nonzero()[:, 0] for mask in (stored, several, lone)])[:most]
        agreeing = groups.count[chosen].clamp(min=2).double()
        certainty = torch.where(several, 1 - 0.1 ** (agreeing - 1), SINGLE_NEURON_CERTAINTY).masked_fill(stored, 1.0)[order]
        total = rank or examples or "unknown"
        said = f"{len(order)} of {total} examples were found, each alone in activating a neuron" if len(order) else _NONE_ALONE
        return LinearAnswer(
            x=x[order], d=x.new_zeros(len(order), len(self.rows)), certainty=certainty, rank=rank,
            how="isolated" if len(order) else "", note=_join(note, said, "" if self.biased or not len(order) else _UNSCALED),
            scaled=self.biased,
        )  # fmt: skip

    def _recover_all(self, factors: Factors, found: Directions, examples: int | None, how: str) -> LinearAnswer:
        """Recover the inputs of the layer for a batch from the R directions of its examples, see `sparse`.

        Along an example's direction, a neuron is zero if ReLU turns it off for that example. If inputs and zeros
        together explain the gradient up to its noise, all examples are returned. If they do not, an example is returned only if
        its agreement (`Directions.agreement`) is at least MIN_AGREEMENT.
        factors:  the gradient, factorised with rank R. found: the directions.
        examples: number of examples of the batch, if known; the answer has a note if R is smaller.
        how:      the method that found the directions, for the answer.
        """
        p, info = torch.linalg.inv_ex(found.q)
        if int(info):
            return _build_empty_answer(self.layer, "no independent directions were found", rank=factors.rank)
        seen = find_pattern(found.q, factors)
        x, d, certainty = p @ factors.basis, factors.coordinates @ found.q, found.agreement
        sure = certainty >= MIN_AGREEMENT
        settled = self._fit_gradient(factors, x, seen.on, sure)
        if settled is not None:
            (x, d), certainty, sure = settled, certainty.clamp(min=MIN_AGREEMENT), torch.ones_like(sure)
        side = self._find_scales(x, seen.on)
        x, d = x / side[:, None], d * side
        sure = sure & torch.isfinite(x).all(dim=1)
        if self.biased and settled is not None and bool(sure.all()):
            own, info = torch.linalg.inv_ex(x @ factors.basis.T)
            x = x if int(info) else match_kinks(x, self.weight, find_pattern(own, factors))
        x = x[:, :-1] if self.biased else x
        missing = factors.rank - int(sure.sum())
        words = _join(
            _note_fewer(factors.rank, examples),
            f"{missing} of {factors.rank} examples could not be separated" if missing else "",
            "" if self.biased or missing == factors.rank else _UNSCALED,
        )
        return LinearAnswer(
            x=x[sure], d=d.T[sure], certainty=certainty[sure], rank=factors.rank,
            how=how if bool(sure.any()) else "", note=words, scaled=self.biased,
        )  # fmt: skip

    def _fit_gradient(self, factors: Factors, x: Tensor, seen: Tensor, sure: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return inputs x (R, F'), up to a factor each, and gradients D (M, R) that explain the observed gradient, or None.

        D is zero where x turns neurons off. The zeros of D and the inputs x are fitted alternately, which corrects a few errors,
        until they explain the gradient up to its noise. If that fails and all examples are certain, x and D are fitted to the
        observed zeros instead, however well they explain the gradient.
        x: starting point. seen: (M, R) neurons that are on, as observed. sure: (R,) which examples are certain.
        """
        rows, noise, live = self.rows[factors.live], factors.noise[factors.live], factors.live.nonzero()[:, 0]
        there, on = x, seen
        for _ in range(MAX_ALTERNATIONS):
            on = (self.weight @ (there / self._find_scales(there, on)[:, None]).T) > 0
            d, there, error = polish(rows, noise, on[live], there)
            if not bool(torch.isfinite(there).all()):
                break
            if error <= MAX_RESIDUAL:
                return there, there.new_zeros(on.shape).index_put((live,), d)
        if not bool(sure.all()):
            return None
        d, there, error = polish(rows, noise, seen[live], x)
        return (there, there.new_zeros(on.shape).index_put((live,), d)) if error < float("inf") else None

    def _find_scales(self, x: Tensor, on: Tensor) -> Tensor:
        """Return the factors (R,) by which vectors x (R, F') must be divided to be inputs of the layer, or unit vectors.

        With a bias, the factor is the last entry of x, which is 1 after the division. Without a bias, the norm of the input is
        unknown: the factor is the norm of x, so that the quotient is a unit vector, with the sign for which it turns on the
        neurons in the mask `on` (M, R).
        """
        if self.biased:
            return x[:, -1]
        z = self.weight @ x.T
        positive, negative = (((side * z > 0) == on).double().mean(dim=0) for side in (1, -1))
        length: Tensor = x.norm(dim=1) * torch.where(positive >= negative, 1.0, -1.0)
        return length

    def _compute_inputs(self, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs (K, F) that belong to directions (K, F') of the gradient's rows, and a mask (K,) of possible ones.

        With a bias, an input is possible if its direction's last entry is not zero, and if it turns on no neuron whose gradient
        is zero: such neurons are off for all examples. Without a bias, inputs are unit vectors, and all count as possible.
        """
        z = directions @ self.weight.T
        if not self.biased:
            side = torch.where(z.sum(dim=1, keepdim=True) >= 0, 1.0, -1.0)
            return side * directions, torch.ones(len(z), dtype=torch.bool, device=z.device)
        last = directions[:, -1:]
        there = last.abs() > 1e-9
        off = self.rows.norm(dim=1) == 0
        fits = (z[:, off] * torch.sign(last) <= 1e-6).all(dim=1)
        return directions[:, :-1] / torch.where(there, last, 1), there[:, 0] & fits

    def _is_eight_bit(self, x: Tensor) -> Tensor:
        if self.bounds is None or not self.is_image or not self.biased:
            return torch.zeros(len(x), dtype=torch.bool, device=x.device)
        low, high = self.bounds
        return is_eight_bit((x - low) / (high - low))

    def _is_within_bounds(self, x: Tensor) -> Tensor:
        if self.bounds is None or not self.biased:
            return torch.zeros(len(x), dtype=torch.bool, device=x.device)
        low, high = self.bounds
        slack = 1e-3 * (high - low)
        return ((x >= low - slack) & (x <= high + slack)).all(dim=1)


def _combine_groups(groups: Groups, factors: Factors, forward: Tensor, constant: Tensor | None) -> Directions | None:
    """Return the directions of the R examples (see `Directions`) from groups of parallel rows of the gradient.

    Returns None if fewer than R groups are certain and have independent directions.
    Each group's direction is one example's [x, 1] up to a factor, in the coordinates of the gradient's basis. The directions of
    the examples (see `sparse`) are the columns of the inverse of the matrix that has R such vectors as rows.
    forward: (M, R), the layer's [W, b] in these coordinates. constant: (R,), the last column of the basis if the layer has a
    bias; else None.
    """
    sure = groups.directions[groups.confirmed]
    chosen = select_independent(sure)
    if len(chosen) < factors.rank:
        return None
    q, info = torch.linalg.inv_ex(sure[chosen])
    return None if int(info) else Directions(q, measure_agreement(q, find_pattern(q, factors), forward, constant), 0)


_UNSCALED = "the layer has no bias, so the norm of its input is not known"
_NONE_ALONE = "no neuron is known to be activated by a single example only"


def _augment(layer: Layer, tensors: Tensors) -> Tensor:
    """Return weight and bias of a layer in one matrix (width, F + 1), or (width, F) if it has no bias, in float64."""
    weight = tensors[layer.weight].double()
    return weight if layer.bias is None else torch.cat([weight, tensors[layer.bias].double()[:, None]], dim=1)


def _explain_refusal(layer: Layer, gradient: Tensors) -> str | None:
    if layer.kernel is not None:
        return f"its first layer, {layer.name}, is a convolution, and a linear layer is needed"
    if prod(layer.inputs) != prod(layer.taken):
        return f"pooling before its first layer, {layer.name}, reduces {prod(layer.inputs)} input values to {prod(layer.taken)}"
    rows = _augment(layer, gradient)
    if not bool(torch.isfinite(rows).all()):
        return f"the gradient of layer {layer.name} contains NaN or infinite values"
    if not bool((rows != 0).any()):
        return f"the gradient of layer {layer.name} is zero: no example activates any neuron"
    return None


def _build_empty_answer(layer: Layer, note: str, *, rank: int = 0) -> LinearAnswer:
    return LinearAnswer(
        x=torch.zeros(0, prod(layer.taken), dtype=torch.float64),
        d=torch.zeros(0, layer.shape[0], dtype=torch.float64),
        certainty=torch.zeros(0, dtype=torch.float64), rank=rank, how="", note=note,
    )  # fmt: skip


def _explain_shared_direction(layer: Layer, examples: int | None) -> str:
    return (
        f"the gradient of layer {layer.name or 'one'} has rank 1 for {examples or 'an unknown number of'} examples, as it has "
        "for any examples whose errors are parallel at its outputs, so that the examples cannot be separated: any answer would "
        "be a mixture of them"
    )


def _note_single(examples: int | None) -> str:
    return "" if examples == 1 else _note_fewer(1, examples)


def _note_fewer(rank: int, examples: int | None) -> str:
    if examples is None or rank >= examples:
        return ""
    return (
        f"the gradient of the first layer has rank {rank} for {examples} examples: some examples are equal, or contribute less "
        "to it than its rounding or noise"
    )


def _explain_missing_rank(rows: Tensor, examples: int | None, factors: Factors | None) -> str:
    if factors is not None:
        return (
            f"the gradient of the first layer has full rank, {factors.rank}: the batch may have more examples than that, which "
            "cannot be separated"
        )
    zeros = float((rows == 0).double().mean())
    why = (
        f"more examples than neurons or input values, noise, several steps, or entries that were not sent ({zeros:.0%} are zero)"
    )
    return f"the gradient of the first layer has no clear rank, as that of {examples or 'few'} examples would have; causes: {why}"


def _join(*words: str) -> str:
    return "; ".join(word for word in words if word)
