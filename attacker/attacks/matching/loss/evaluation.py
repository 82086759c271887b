"""The evaluation of one observation's part of the loss and of its gradient by the latents, for all problems."""

import torch
from torch import Tensor
from torch.func import grad_and_value, vjp

from attacker.attacks.gradients.adjoints import Adjoints
from attacker.attacks.gradients.compiled import CompiledEvaluation, EvaluateLoss
from attacker.attacks.gradients.products import GradientTensors
from attacker.attacks.gradients.vectorised import PerProblem, join_problems, split_problems
from attacker.attacks.matching.loss.problems import Decode, ProblemRow, get_row, map_problems
from attacker.attacks.matching.loss.view import View


class ViewEvaluation:
    """A function that evaluates the part of the loss that belongs to one view, in the fastest way that the view allows.

    Without compilation, the examples of all problems are computed in one batch (`View.at_once`) or, if that cannot be done,
    problem by problem by `map_problems`. With compilation, explicit formulas (`View.written`) are used if there are any.
    compiled: the compiled function; None before its first use. to_compile: whether to compile it by `torch.compile`.
    """

    def __init__(self, view: View, *, to_compile: bool) -> None:
        self.view, self.to_compile = view, to_compile
        self.compiled: CompiledEvaluation | None = None

    def __call__(
        self, z: Tensor, row: ProblemRow, decode: Decode, problem: ProblemRow, precision: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return this observation's part of the loss at latents z (P, D): first its gradient by z, (P, D), then its values (P,).

        row: data of the observation, one row per problem. problem: data that `decode` and the weighting need, such as labels, one
        row per problem.
        precision: data type of large convolutions if all problems are computed in one batch; None for the data type of the
        weights. The loss is compiled only if `precision` is None.
        """
        if not self.to_compile or precision is not None:
            return self._build_evaluation(decode, precision)(z, row, problem)
        if self.compiled is None:
            best = self._build_vmap_evaluation(decode)
            if self.view.written is not None:
                best = self._build_formula_evaluation(self.view.written, decode)
            self.compiled = CompiledEvaluation(best, self._build_evaluation(decode), len(self.view.worst))
        return self.compiled(z, row, problem)

    def _build_evaluation(self, decode: Decode, precision: torch.dtype | None = None) -> EvaluateLoss:
        at_once = self.view.at_once
        if at_once is None:
            return self._build_vmap_evaluation(decode)
        return lambda z, row, problem: self._evaluate_at_once(at_once, z, row, decode, problem, precision)

    def _build_vmap_evaluation(self, decode: Decode) -> EvaluateLoss:
        """Return an evaluation function, see `__call__`, that maps over problems by `map_problems`."""

        def compute_loss(z: Tensor, row: ProblemRow, problem: ProblemRow) -> Tensor:
            return self.view.weigh(self.view.compute_distance(row, *decode(z, problem), z), row, problem)

        return lambda z, row, problem: map_problems(grad_and_value(compute_loss), z, row, problem)

    def _build_formula_evaluation(self, written: Adjoints, decode: Decode) -> EvaluateLoss:
        """Return an evaluation function, see `__call__`, that computes gradients and their derivatives by explicit formulas.

        The formulas are `View.written`; they replace differentiating twice by autograd.
        """
        view = self.view

        def compute_loss(gradient: GradientTensors, row: ProblemRow, problem: ProblemRow) -> Tensor:
            simulated = view.observe(written.restore_shapes(gradient), row)
            distance = view.objective.distance(written.lay_out(simulated), written.lay_out(row["observed"]))
            return view.weigh(distance, row, problem)

        def evaluate(z: Tensor, row: ProblemRow, problem: ProblemRow) -> tuple[Tensor, Tensor]:
            def feed(z: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
                x, y = view.select_placed(*decode(z, problem), row)
                x = view.data.normalise(x)
                return ((x, y) if y.is_floating_point() else (x,)), y

            (x, *_), of_guess, y = vjp(feed, z, has_aux=True)  # type: ignore[misc]
            gradient, of_gradient = written(x, y)
            slopes, value = map_problems(grad_and_value(compute_loss), gradient, row, problem)
            return of_guess(of_gradient(slopes))[0], value

        return evaluate

    def _evaluate_at_once(
        self, at_once: PerProblem, z: Tensor, row: ProblemRow, decode: Decode, problem: ProblemRow, precision: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        """Evaluate as `__call__` does, with the examples of all problems in one batch; the problems must share their weights.

        at_once: the function `View.at_once`. Other arguments as in `__call__`.
        """
        view = self.view
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            gradient = at_once(view.weights, *view.select_placed(*decode(z, problem), row), view.buffers, precision)
            stacked, whole = join_problems(gradient), view.objective.distance
            distance = whole if stacked is not None else whole.of_large or whole

            def compare(gradient: GradientTensors, row: ProblemRow) -> Tensor:
                return distance(view.observe(gradient, row), row["observed"])

            if stacked is not None:
                distances = map_problems(compare, stacked, row)
            else:  # one after the other, which is faster for large gradients on a CPU
                distances = torch.stack([compare(one, get_row(row, i)) for i, one in enumerate(split_problems(gradient))])
            value = view.weigh(distances, row, problem)
            if not value.requires_grad:  # no part of the gradient was sent
                return torch.zeros_like(z), value
            (slope,) = torch.autograd.grad(value.sum(), z)
        return slope, value.detach()
