"""Error feedback: the compression error of one round is added to the update of the next."""

from torch import Generator

from defenses.base import Defense, State, Update


def with_feedback(compressor: Defense) -> Defense:
    """Return a defense that sends C(u + e) and keeps the residual e' = u + e - C(u + e), starting from e = 0.

    The sum of all sent updates plus the residual equals the sum of all updates: entries are delayed, not lost.
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
