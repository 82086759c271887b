"""Refinement of the answer to all rounds of a client whose defense keeps back a part of its updates, by solving equations.

With error feedback, a client sends later what it does not send now. Each value that it sent is an equation for its examples. Over
enough rounds there are more equations than the examples have values, and all hold up to rounding. A search by gradients stops far
from their solution, since some directions are badly determined; Gauss-Newton steps reach it. The solution then differs from the
examples by rounding errors of the client, of which those of the loss's derivatives by the outputs matter most. They are excluded.

Shapes: T rounds, N examples, D = N times the number of values of an example, R values that were sent in all rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from torch.func import vjp, vmap

from attacker.attacks.base import Progress
from attacker.attacks.cases import Case
from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.confidence.estimates import CERTIFIED_CONFIDENCE
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.matching.loss.rounds_in_order import MAX_STACKED_WEIGHTS
from attacker.attacks.optimisers.gauss_newton import (
    Derivative,
    LeastSquares,
    Linearisation,
    Minimum,
    differentiate_along,
    minimise_squares,
)
from attacker.attacks.simulation.client import build_network, follow_channel
from attacker.attacks.simulation.gradients import build_gradient, explain_vmap_failure, predict
from attacker.reconstruction import Reconstruction
from defenses.channel import ChannelState
from fedsim.recording.observation import Observation

MAX_ENTRIES = 1e8
"""Number of entries, equations times unknowns, up to which an answer is refined. The Jacobian takes 4 bytes for each."""
EQUATIONS_PER_UNKNOWN = 8
"""Number of equations for each unknown that are solved. Those of later rounds only test the solution."""
MAX_MISFIT = 1e-3
"""Norm of the residual, relative to that of the values sent, up to which the equations of all rounds count as solved."""
ROUNDING = 5e-7
"""The same up to which the rest may be rounding of the values sent, so that no new linearisation is made for it."""
STEPS = 12
"""Maximum number of Gauss-Newton steps."""
FINAL_STEPS = 2
"""The same for the steps without errors of the derivatives by outputs, at the end."""
ANCHORS = 20
"""Number of rounds at which gradients are differentiated for the approximate Jacobian; between them it is interpolated."""
FACTORS_AT_ONCE = 25
"""Number of rounds whose factors are computed at once."""
CHUNK = 512
"""Number of unknowns by which gradients are differentiated at once."""


def refine(case: Case, answer: Reconstruction, *, device: str, progress: Progress | None) -> Reconstruction:
    """Return the answer of a search with examples that solve the equations of all values sent; `answer` if there are none.

    The answer is changed only if the equations then hold up to `MAX_MISFIT`, so that no choice depends on the truth. Examples
    whose values are those of 8-bit images then get the confidence `CERTIFIED_CONFIDENCE`. If the user interrupts after the
    equations were solved, the solution is returned, as an interrupted answer.
    case: one client's rounds, with links. answer: of the search, to which a note on the outcome is added.
    """
    started = perf_counter()
    assert case.links is not None
    reason = _explain_unsuitable(case, answer.x.numel())
    values = None if reason else SentEquations(case.observations, answer.y, case.links.places, device=device)
    if values is None or (reason := values.explain_unsolvable(answer.x.numel())):
        return replace(answer, notes=(*answer.notes, f"the answer was not refined by Gauss-Newton steps, since {reason}"))
    used = values.take_rounds(EQUATIONS_PER_UNKNOWN * answer.x.numel())
    scale = float(used.values.norm())

    def report(step: int, norm: float) -> None:
        if progress is not None:
            progress(step, STEPS + FINAL_STEPS, f"refining, misfit {norm / scale:.1e}")

    problem, interrupted = LeastSquares(used.compute_residual, used.linearise), False
    try:
        start = answer.x.double().flatten().to(device)
        end = minimise_squares(problem, start, steps=STEPS, enough=ROUNDING * scale, progress=report)
        if end.norm <= ROUNDING * scale:
            try:
                report(end.steps, end.norm)
                end = exclude_output_errors(used, problem, end)
            except KeyboardInterrupt:
                interrupted = True
        before, misfit = (float(values.compute_residual(z).norm() / values.values.norm()) for z in (start, end.z))
    except KeyboardInterrupt:
        return replace(answer, interrupted=True)
    except RuntimeError as error:  # of PyTorch: no forward-mode derivative, values that are not finite, too little memory
        note = f"the answer was not refined by Gauss-Newton steps: {' '.join(str(error).split())[:200]}"
        return replace(answer, notes=(*answer.notes, note))
    seconds = answer.seconds + perf_counter() - started
    if not misfit <= min(MAX_MISFIT, before):
        note = f"Gauss-Newton steps left a misfit of {misfit:.1e} of what was sent, so that the search's answer was kept"
        return replace(answer, notes=(*answer.notes, note), seconds=seconds)
    x = end.z.reshape(answer.x.shape).float().cpu()
    solved = f"{end.steps} Gauss-Newton steps solved the equations of {used.count} of the {values.count} values sent"
    note = f"{solved}; all of them hold up to {misfit:.1e}"
    sure = is_eight_bit(x) if values.observed.data.is_image else torch.zeros(len(x), dtype=torch.bool)
    confidence = torch.where(sure, CERTIFIED_CONFIDENCE, answer.confidence)
    notes = [note for note in answer.notes if not (sure.all() and note.startswith("confidence is undecided"))]
    return replace(answer, x=x, confidence=confidence, notes=(*notes, note), seconds=seconds, interrupted=interrupted)


def exclude_output_errors(used: "SentEquations", problem: LeastSquares, end: Minimum) -> Minimum:
    """Return the minimum of `problem`, which has the minimum `end`, without `SentEquations.find_output_errors`.

    Returns `end` if these errors cannot be excluded.
    """
    try:
        if (basis := used.find_output_errors(end.z)) is None:
            return end
        linear = None if end.linear is None else end.linear.project_out(basis)
        last = minimise_squares(problem.project_out(basis), end.z, steps=FINAL_STEPS, linear=linear)
    except RuntimeError:  # of PyTorch, such as too little memory: the equations are solved without it
        return end
    return replace(last, steps=end.steps + last.steps)


def _explain_unsuitable(case: Case, unknowns: int) -> str:
    """Return why the equations of a case, which has links, are not built for so many unknowns, or "" if they can be."""
    assert case.links is not None
    if len({len(places) for places in case.links.places}) > 1:
        return "rounds have different numbers of examples"
    maximum = int((MAX_ENTRIES / EQUATIONS_PER_UNKNOWN) ** 0.5)
    if unknowns > maximum:
        return f"the examples have {unknowns} values, and at most {maximum} are possible"
    weights = sum(w.numel() for observation in case.observations for w in observation.weights.values())
    return f"the rounds have {weights} weights together" if weights > MAX_STACKED_WEIGHTS else ""


class SentEquations:
    """The values that a client sent in its rounds, as equations for its examples; computed in float64.

    rounds: observations of one client, in order. y: (N,) labels. places: for each round the indices of its examples, (n,).
    count:  number R of equations.
    """

    def __init__(self, rounds: Sequence[Observation], y: Tensor, places: Sequence[Tensor], *, device: str) -> None:
        self.arguments = (y, places, device)
        self.rounds, self.model = rounds, build_network(rounds[0]).double().to(device)
        self.observed = ObservedGradients(rounds, model=self.model, device=device)
        observed = self.observed
        self.gradient = build_gradient(
            self.model, observed.data, observed.training.loss, observed.rule if observed.own_rule else None
        )
        self.y, self.places = y.to(device), torch.stack(list(places)).to(device)
        count = len(rounds)
        self.weights = {
            name: (w.expand(count, *w.shape) if observed.shared else w).double() for name, w in observed.weights.items()
        }
        self.buffers = {
            name: _to(b.expand(count, *b.shape) if observed.same_buffers else b, torch.float64)
            for name, b in observed.buffers.items()
        }
        self.known = [observed.channel.learn({name: s[t] for name, s in observed.seen.items()}) for t in range(count)]
        self.names = [name for name in self.weights if name not in observed.omitted]
        is_sent, values = self._flatten(observed.seen) != 0, self._flatten(observed.gradients).double()
        self.width = values.shape[1]
        self.sent = [mask.nonzero()[:, 0] for mask in is_sent]
        self.units = [values[t, at].square().mean().sqrt() if len(at) else values.new_ones(()) for t, at in enumerate(self.sent)]
        self.values = torch.cat([values[t, at] / unit for t, (at, unit) in enumerate(zip(self.sent, self.units, strict=True))])
        self.count = len(self.values)

    def take_rounds(self, limit: int) -> "SentEquations":
        """Return the equations of the first rounds alone, of as many as have at least `limit` equations, or of all."""
        counts = torch.tensor([len(at) for at in self.sent]).cumsum(dim=0)
        needed = int((counts < limit).sum()) + 1
        y, places, device = self.arguments
        return self if needed >= len(self.rounds) else SentEquations(self.rounds[:needed], y, places[:needed], device=device)

    def explain_unsolvable(self, unknowns: int) -> str:
        """Return why the equations cannot be solved for so many unknowns, D, or "" if they can."""
        observed = self.observed
        if observed.steps != 1 or not observed.training.is_linear:
            return "clients do not train one step of SGD without clipping"
        if bool((observed.variance > 0).any()):
            return "the defense adds noise"
        if self.count < unknowns:
            return f"{self.count} values were sent, and the examples have {unknowns}"
        return explain_vmap_failure(build_network(self.rounds[0]), observed.data, observed.training.loss)

    def compute_gradients(self, x: Tensor) -> Mapping[str, Tensor]:
        """Return the gradients of all rounds, by name, (T, *shape), for examples x, (D,)."""
        examples = x.reshape(-1, *self.observed.data.shape)

        def compute(weights: dict[str, Tensor], buffers: dict[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
            return dict(self.gradient(weights, examples[indices], self.y[indices], buffers))

        return vmap(compute)(self.weights, self.buffers, self.places)

    def find_output_errors(self, x: Tensor) -> Tensor | None:
        """Return an orthonormal basis (R, E) of how errors of the loss's derivatives by outputs change the values sent.

        A client computes these E derivatives, by all outputs for the examples of all rounds, in float32. The rounding error of
        one changes all values of a gradient together, so that it shifts the solution by more than errors of single values.
        Returns None if the equations do not determine the examples and these errors, or if the basis is too large.
        """
        examples = x.reshape(-1, *self.observed.data.shape)

        def predict_all(weights: dict[str, Tensor]) -> Tensor:
            def compute(weights: dict[str, Tensor], buffers: dict[str, Tensor], indices: Tensor) -> Tensor:
                return predict(self.model, self.observed.data, self.observed.training.loss, weights, examples[indices], buffers)

            return vmap(compute)(weights, self.buffers, self.places).flatten(1)

        outputs, pull = vjp(predict_all, self.weights)  # type: ignore[misc]
        if outputs.numel() + len(x) > self.count or outputs.numel() * self.count > MAX_ENTRIES:
            return None
        factors, sent = self._compute_factors(x).to(x), torch.cat(self.sent)
        units = torch.eye(outputs.shape[1], dtype=x.dtype, device=x.device)
        changes = torch.cat([factors * self._flatten(pull(unit.expand_as(outputs))[0])[:, sent] for unit in units])
        basis: Tensor = torch.linalg.qr(changes.T).Q
        return basis

    def _flatten(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the gradients of all rounds as one matrix, (T, P)."""
        return torch.cat([gradients[name].flatten(1) for name in self.names], dim=1)

    def send(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the values that the client would send, (R,), in the units of the round, given its gradients."""
        state: ChannelState = {}
        rounds = []
        for t, (at, unit) in enumerate(zip(self.sent, self.units, strict=True)):
            weights = {name: w[t] for name, w in self.weights.items()}
            own = {name: g[t] for name, g in gradients.items()}
            expected, state = follow_channel(
                self.observed.channel, state, self.known[t], own, weights, self.observed.training, self.observed.steps
            )
            rounds.append(torch.cat([expected[name].flatten() for name in self.names])[at] / unit)
        return torch.cat(rounds)

    def compute_residual(self, x: Tensor) -> Tensor:
        return self.send(self.compute_gradients(x)) - self.values

    def linearise(self, x: Tensor) -> Linearisation:
        """Return the linearisation of the residual at x, (D,).

        It is exact if the defense treats each coordinate on its own and linearly, as error feedback and DGC do. For other
        defenses it is approximate, so that steps decrease the residual by less.
        """
        factors, sent = self._compute_factors(x), torch.cat(self.sent)

        def differentiate(x: Tensor) -> Derivative:
            def compute(x: Tensor) -> Tensor:
                return self._flatten(self.compute_gradients(x))

            _, pull = vjp(compute, x)  # type: ignore[misc]

            def back(r: Tensor) -> Tensor:
                slopes = torch.zeros(len(factors), self.width, dtype=r.dtype, device=r.device)
                back: Tensor = pull(slopes.index_add_(1, sent, factors * r))[0]
                return back

            return Derivative(lambda d: (factors * differentiate_along(compute, x, d)[:, sent]).sum(dim=0), back)

        return Linearisation(self._approximate_jacobian(x, factors), differentiate)

    def _approximate_jacobian(self, x: Tensor, factors: Tensor) -> Tensor:
        """Return the Jacobian of the residual, (R, D), in float32.

        The derivatives of the gradients by the examples are computed for `ANCHORS` rounds, and interpolated between them.
        """
        anchors, shares = _interpolate(len(self.sent), ANCHORS)
        sent, jacobian = torch.cat(self.sent), torch.zeros(self.count, len(x), device=x.device)
        for t, factor in zip(anchors, shares.to(factors) @ factors, strict=True):
            used = factor.nonzero()[:, 0]
            jacobian[used] += factor[used, None] * self._differentiate_round(t, x)[sent[used]]
        return jacobian

    def _compute_factors(self, x: Tensor) -> Tensor:
        """Return the derivative of each value sent by the same coordinate of each round's gradient, (T, R).

        These are all derivatives by gradients if the defense treats each coordinate on its own, as error feedback does.
        """
        gradients = self.compute_gradients(x)

        def compute(direction: Tensor) -> Tensor:
            directions = {name: direction.reshape(-1, *[1] * (g.ndim - 1)).expand_as(g) for name, g in gradients.items()}
            return differentiate_along(self.send, gradients, directions).float()

        unit = torch.eye(len(self.sent), dtype=x.dtype, device=x.device)
        return torch.cat([vmap(compute)(part) for part in torch.split(unit, FACTORS_AT_ONCE)])

    def _differentiate_round(self, t: int, x: Tensor) -> Tensor:
        """Return the derivatives of one round's gradient by all unknowns, (P, D), in float32."""
        state = (self.weights, self.buffers)
        weights, buffers = ({name: _to(value[t], torch.float32) for name, value in tensors.items()} for tensors in state)
        indices = self.places[t]

        def compute(x: Tensor) -> Tensor:
            examples = x.reshape(-1, *self.observed.data.shape)
            own = self.gradient(weights, examples[indices], self.y[indices], buffers)
            return torch.cat([own[name].flatten() for name in self.names])

        x = x.float()
        unit = torch.eye(len(x), device=x.device)
        rows = torch.cat([vmap(lambda v: differentiate_along(compute, x, v))(part) for part in torch.split(unit, CHUNK)])
        return rows.T


def _interpolate(count: int, limit: int) -> tuple[list[int], Tensor]:
    """Return at most `limit` of `count` equally spaced indices, and the shares (len(indices), count) of linear interpolation."""
    anchors = np.linspace(0, count - 1, min(count, limit)).round().astype(int)
    shares = [np.interp(np.arange(count), anchors, unit) for unit in np.eye(len(anchors))]
    return anchors.tolist(), torch.from_numpy(np.stack(shares))


def _to(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() else t
