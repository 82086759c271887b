"""L-BFGS over many independent problems at once, with fixed steps or with a line search for each."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import OptimiserState, add_prefix, remove_prefix
from attacker.attacks.optimisers.lbfgs_memory import History, norm
from attacker.attacks.optimisers.line_search import LineSearches


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """L-BFGS (Liu & Nocedal 1989) for each problem separately, with the step lengths of `torch.optim.LBFGS` or a line search.

    history:        maximum number of pairs (step, gradient change) in memory.
    period:         gradient evaluations that count as one iteration, like `max_iter` of torch.optim.LBFGS.
    line_search:    whether step lengths are chosen by the strong Wolfe conditions. Otherwise a step is `learning_rate` times the
                    direction; while the memory is empty, it is shortened to an L1 norm of at most `learning_rate`.
    min_curvature:  a pair is stored only if <step, change> is above this share of ||step|| * ||change||.
    min_descent:    a direction is used if -<gradient, direction> is at least this share of ||gradient|| * ||direction||.
                    Otherwise the memory of the problem is cleared, and it steps along its negative gradient.

    The defaults of `min_curvature` and `min_descent` are the thresholds of torch.optim.LBFGS, which are absolute there and end
    searches with a small loss.
    """

    learning_rate: float = 1.0
    history: int = 100
    period: int = 20
    line_search: bool = False
    min_curvature: float = 1e-10
    min_descent: float = 1e-9

    @property
    def remembers(self) -> int:
        return 2 * self.history + (len(_ON_A_LINE) if self.line_search else 2)

    def start(self) -> "LBFGSStepper | SearchingStepper":
        return SearchingStepper(self) if self.line_search else LBFGSStepper(self)


@dataclass
class LBFGSStepper:
    """A running L-BFGS optimisation without a line search, of P problems with D variables.

    previous: gradient at the last step, (P, D). taken: change of the variables in this step, (P, D). `previous`, `taken` and
    `history` are None before the first step.
    """

    settings: LBFGS
    history: History | None = None
    previous: Tensor | None = None
    taken: Tensor | None = None

    def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
        if self.history is None or self.previous is None or self.taken is None:
            self.history = History.empty(z, limit=self.settings.history, min_curvature=self.settings.min_curvature)
        else:
            self.history.add(self.taken, gradient - self.previous)
        direction = _find_descent(self.history, gradient, self.settings)
        self.previous, self.taken = gradient, _choose_first_length(self.history, gradient, self.settings)[:, None] * direction
        return z + self.taken

    def keep(self, rows: Tensor) -> None:
        if self.history is not None and self.previous is not None and self.taken is not None:
            self.history.keep(rows)
            self.previous, self.taken = self.previous[rows], self.taken[rows]

    def get_state(self) -> OptimiserState:
        if self.history is None or self.previous is None or self.taken is None:
            return {}
        return {**add_prefix("history", self.history.get_state()), "previous": self.previous, "taken": self.taken}

    def load(self, state: OptimiserState) -> None:
        if state:
            self.history = History.of(
                remove_prefix("history", state), limit=self.settings.history, min_curvature=self.settings.min_curvature
            )
            self.previous, self.taken = state["previous"], state["taken"]


@dataclass
class SearchingStepper:
    """A running L-BFGS optimisation with a line search, of P problems with D variables.

    lines: the scalar state of the line searches, one entry per problem. `lines` and `history` are None before the first step.
    at:    the vectors of the line searches by name, (P, D) each. origin: the point where the line begins. direction: the
           direction of the line. low: the best point found on the line, see `LineSearches`. uphill, low_uphill: the gradients at
           `origin` and at `low`.
    """

    settings: LBFGS
    history: History | None = None
    lines: LineSearches | None = None
    at: dict[str, Tensor] = field(default_factory=dict)

    def step(self, z: Tensor, gradient: Tensor, loss: Tensor, progress: float) -> Tensor:
        if self.history is None or self.lines is None:
            self.history = History.empty(z, limit=self.settings.history, min_curvature=self.settings.min_curvature)
            direction = -gradient
            self.lines = LineSearches.from_slope(
                loss, -gradient.square().sum(dim=1), _choose_first_length(self.history, gradient, self.settings)
            )
            self.at = dict(zip(_ON_A_LINE, (z, gradient, direction, z, gradient), strict=True))
        else:
            self._update(self.history, self.lines, z, gradient, loss)
        return self.at["origin"] + self.lines.length[:, None] * self.at["direction"]

    def _update(self, history: History, lines: LineSearches, z: Tensor, gradient: Tensor, loss: Tensor) -> None:
        """Process gradient (P, D) and loss (P,) at the trial points `z` (P, D).

        For problems whose line search this finishes, store the step in `history`, or clear their memory if no lower point was
        found, and begin a search along a new direction. `history`, `lines` and `self.at` are changed in place.
        """
        at = self.at
        lower, over = lines.process_trial(loss, (gradient * at["direction"]).sum(dim=1))
        at["low"] = torch.where(lower[:, None], z, at["low"])
        at["low_uphill"] = torch.where(lower[:, None], gradient, at["low_uphill"])
        if not over.any():
            return
        moved = over & (lines.low_length > 0)
        step, change = at["low"] - at["origin"], at["low_uphill"] - at["uphill"]
        history.add(step * moved[:, None], change * moved[:, None])
        if (stuck := over & ~moved).any():
            history.forget(stuck)
        at["origin"] = torch.where(moved[:, None], at["low"], at["origin"])
        at["uphill"] = torch.where(moved[:, None], at["low_uphill"], at["uphill"])
        direction = _find_descent(history, at["uphill"], self.settings, over)
        at["direction"] = torch.where(over[:, None], direction, at["direction"])
        at["low"], at["low_uphill"] = (torch.where(over[:, None], at[a], at[b]) for a, b in _FROM_ORIGIN)
        slope = (at["uphill"] * at["direction"]).sum(dim=1)
        lines.begin(over, slope, _choose_first_length(history, at["uphill"], self.settings))

    def keep(self, rows: Tensor) -> None:
        if self.history is not None and self.lines is not None:
            self.history.keep(rows)
            self.lines.keep(rows)
            self.at = {name: t[rows] for name, t in self.at.items()}

    def get_state(self) -> OptimiserState:
        if self.history is None or self.lines is None:
            return {}
        return {
            **add_prefix("history", self.history.get_state()),
            **add_prefix("lines", self.lines.get_state()),
            **add_prefix("at", self.at),
        }

    def load(self, state: OptimiserState) -> None:
        if state:
            self.history = History.of(
                remove_prefix("history", state), limit=self.settings.history, min_curvature=self.settings.min_curvature
            )
            self.lines = LineSearches(**remove_prefix("lines", state))
            self.at = remove_prefix("at", state)


_ON_A_LINE = ("origin", "uphill", "direction", "low", "low_uphill")
_FROM_ORIGIN = (("origin", "low"), ("uphill", "low_uphill"))


def _find_descent(history: History, gradient: Tensor, settings: LBFGS, mask: Tensor | None = None) -> Tensor:
    """Return a search direction for each problem, (P, D): the L-BFGS direction if it descends, else the negative gradient.

    A problem whose L-BFGS direction does not descend, see `LBFGS.min_descent`, has its memory cleared.
    mask: mask (P,) of the problems that need a direction; the others keep their memory, and their rows of the result are not
           used. None for all.
    """
    direction = history.compute_direction(gradient)
    uphill = norm(gradient)
    slope = (gradient * direction).sum(dim=1)
    lost = ~(slope <= -settings.min_descent * uphill * norm(direction)) & (uphill > 0)
    lost = lost if mask is None else lost & mask
    if lost.any():
        history.forget(lost)
        direction = torch.where(lost[:, None], -gradient, direction)
    return direction


def _choose_first_length(history: History, gradient: Tensor, settings: LBFGS) -> Tensor:
    """Return the first step length of each problem (P,). Until its memory is filled, the L1 norm of the step is limited.

    The limit is the learning rate, as in torch.optim.LBFGS.
    """
    unit = (1 / gradient.abs().sum(dim=1)).clamp(max=1)
    length: Tensor = torch.where(history.count == 0, unit, 1) * settings.learning_rate
    return length
