"""Error feedback: what a compressor loses in one round is added to the update of the next."""

from torch import Generator

from defenses.base import Defense, State, Update


def with_feedback(compressor: Defense) -> Defense:
    """Send C(u + e) and keep e' = u + e - C(u + e), by parameter name, from e = 0.

    All that was sent and the residual add up to all updates: nothing is lost, it is late.
    Source: Karimireddy et al. 2019, algorithm 2; first in Seide et al. 2014.
    """

    def init(template: Update) -> State:
        inner = compressor.init(template)
        return _joined({name: t.new_zeros(t.shape) for name, t in template.items()}, inner)

    def apply(update: Update, state: State, rng: Generator) -> tuple[Update, State]:
        due = {name: t + state[f"residual/{name}"] for name, t in update.items()}
        sent, inner = compressor.apply(due, _part(state, "inner/"), rng)
        return sent, _joined({name: t - sent[name] for name, t in due.items()}, inner)

    return Defense(init, apply)


def _joined(residual: Update, inner: State) -> State:
    return {f"residual/{name}": t for name, t in residual.items()} | {f"inner/{name}": t for name, t in inner.items()}


def _part(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
