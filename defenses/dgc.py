"""Deep gradient compression: sparse updates with momentum and a residual (what was not sent yet) on the client."""

import math

import torch
from torch import Generator, Tensor

from defenses.base import Defense, State, Update
from defenses.clipping import scale_to
from defenses.sparsification import count_kept, find_largest


def dgc(
    keep: float,
    *,
    momentum: float = 0.9,
    clip_norm: float | None = None,
    workers: int = 1,
    warm_up_rounds: int = 0,
    masking: bool = True,
    nesterov: bool = False,
    dense_vectors: bool = True,
) -> Defense:
    """Send the largest entries of the accumulated momentum, and keep the rest for later rounds (deep gradient compression).

    Returns this defense, a `Defense`.
    With the update d of a round, the momentum u <- m u + d and the residual v <- v + u are updated. The entries of v with the
    largest magnitudes are sent and set to zero in v. The server must not use momentum itself.

    keep:           share in (0, 1] of each tensor that is sent: exactly ceil(keep * n) of n entries. The released code estimates
                    a threshold from a sample and sends about this number.
    momentum:       m in [0, 1).
    clip_norm:      clip d to the norm clip_norm / sqrt(workers) first, in the update's units; positive. None: no clipping.
    workers:        number of clients in the formula of `clip_norm`; at least 1.
    warm_up_rounds: E. In the first E rounds in which a client takes part, e = 0 .. E - 1, more is sent: the share
                    keep ** ((e + 1) / (E + 1)) instead of `keep`.
    masking:        momentum factor masking: entries that are sent are set to zero in u as well.
    nesterov:       use u <- m (u + d), v <- v + u + d.
    dense_vectors:  send tensors of fewer than two dimensions completely: u, or u + d with `nesterov`; as in the released code.
    Source: Lin et al. 2018, sections 3.1 to 3.3, and its released code.
    """
    _check(keep, momentum, clip_norm, workers, warm_up_rounds)

    def init(template: Update) -> State:
        gathered = {f"momentum/{name}": t.new_zeros(t.shape) for name, t in template.items()}
        unsent = {f"residual/{name}": t.new_zeros(t.shape) for name, t in template.items() if not is_dense(t, dense_vectors)}
        return {"round": torch.zeros((), dtype=torch.int64), **gathered, **unsent}

    def apply(update: Update, state: State, rng: Generator) -> tuple[Update, State]:
        bounded = update if clip_norm is None else scale_to(update, clip_norm / math.sqrt(workers))
        share = _compute_density(keep, int(state["round"]), warm_up_rounds)
        sent: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {"round": state["round"] + 1}
        for name, d in bounded.items():
            u, step = correct_momentum(state[f"momentum/{name}"], d, momentum, nesterov)
            if is_dense(d, dense_vectors):
                sent[name], after[f"momentum/{name}"] = step.clone(), u
                continue
            v = state[f"residual/{name}"] + step
            mask = find_largest(v.flatten(), count_kept(share, v.numel())).reshape(v.shape)
            nothing = torch.zeros_like(v)
            sent[name] = torch.where(mask, v, nothing)
            after[f"residual/{name}"] = torch.where(mask, nothing, v)
            after[f"momentum/{name}"] = torch.where(mask, nothing, u) if masking else u
        return sent, after

    return Defense(init, apply)


def _compute_density(keep: float, done: int, warm_up_rounds: int) -> float:
    """Return the share that is sent after `done` rounds, which is larger in the warm-up (Lin et al. 2018, section 3.3)."""
    return keep if done >= warm_up_rounds else keep ** ((done + 1) / (warm_up_rounds + 1))


def is_dense(tensor: Tensor, dense_vectors: bool) -> bool:
    """Return whether DGC sends a tensor completely: with `dense_vectors`, every tensor of fewer than two dimensions."""
    return dense_vectors and tensor.ndim < 2


def correct_momentum(u: Tensor, d: Tensor, momentum: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """Return the momentum after a round with the update d, and the term that is added to the residual.

    u: the momentum before the round. momentum, nesterov: as in `dgc`.
    """
    if nesterov:
        u = momentum * (u + d)
        return u, u + d
    u = momentum * u + d
    return u, u


def _check(keep: float, momentum: float, clip_norm: float | None, workers: int, warm_up_rounds: int) -> None:
    if not 0 < keep <= 1:
        raise ValueError(f"dgc: keep must be in (0, 1], got {keep}")
    if not 0 <= momentum < 1:
        raise ValueError(f"dgc: momentum must be in [0, 1), got {momentum}")
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise ValueError(f"dgc: clip_norm must be positive and finite, got {clip_norm}")
    if not (isinstance(workers, int) and workers >= 1):
        raise ValueError(f"dgc: workers must be a whole number of at least 1, got {workers}")
    if not (isinstance(warm_up_rounds, int) and warm_up_rounds >= 0):
        raise ValueError(f"dgc: warm_up_rounds must be a whole number of at least 0, got {warm_up_rounds}")
