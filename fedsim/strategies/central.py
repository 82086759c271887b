"""Central differential privacy with Flower's strategies, which clip each update on the server and add noise to the mean.

The noise protects against observers of the global model. It does not protect against the server, which sees and records every
update before it is clipped.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from defenses.registry import bind_arguments
from fedsim.flower import records
from fedsim.strategies.wrapper import Wrapper

Flowers = flower.DifferentialPrivacyServerSideFixedClipping | flower.DifferentialPrivacyServerSideAdaptiveClipping


def clip_fixed(inner: Strategy, drawn: int, *, noise_multiplier: float, clipping_norm: float) -> Flowers:
    """Wrap `inner` so that every update is clipped to a fixed norm, and noise is added to the mean (McMahan et al. 2018).

    drawn:            number of clients per round.
    noise_multiplier: z, not negative. With `CentralPrivacy`, see `wrap`, the noise on the mean of m received
                      updates has standard deviation z * clipping_norm / m.
    clipping_norm:    largest L2 norm of an update (local minus global weights); positive.
    Raises ValueError for values out of range.
    """
    _check(noise_multiplier, clipping_norm)
    return flower.DifferentialPrivacyServerSideFixedClipping(inner, noise_multiplier, clipping_norm, drawn)


def clip_adaptively(
    inner: Strategy,
    drawn: int,
    *,
    noise_multiplier: float,
    clipping_norm: float = 0.1,
    clipped_quantile: float = 0.5,
    norm_learning_rate: float = 0.2,
    clipped_count_stddev: float | None = None,
) -> Flowers:
    """Wrap `inner` so that updates are clipped to a norm that adapts to them, and noise is added (Andrew et al. 2021).

    drawn:                number of clients per round.
    noise_multiplier:     as in `clip_fixed`, for the mean and the number of clipped updates together: the mean gets more noise
                          than with `clip_fixed`, so that both together cost as much privacy as the mean alone with `clip_fixed`.
    clipping_norm:        norm of the first round; positive.
    clipped_quantile:     target share, in [0, 1], of updates that are clipped (in the paper, the quantile is the share of updates
                          that are not clipped).
    norm_learning_rate:   positive; each round multiplies the norm by exp(norm_learning_rate * (clipped share - target share)),
                          with noise on the clipped share.
    clipped_count_stddev: standard deviation of the noise on the number of clipped updates; by default drawn / 20.
    Raises ValueError for values out of range.
    """
    _check(noise_multiplier, clipping_norm)
    if not 0 <= clipped_quantile <= 1:
        raise ValueError(f"strategy.central.clipped_quantile must be in [0, 1], got {clipped_quantile}")
    if not 0 < norm_learning_rate < math.inf:
        raise ValueError(f"strategy.central.norm_learning_rate must be positive and finite, got {norm_learning_rate}")
    wrapped = flower.DifferentialPrivacyServerSideAdaptiveClipping(
        inner, noise_multiplier, drawn, clipping_norm, clipped_quantile, norm_learning_rate, clipped_count_stddev
    )
    # Flower 1.41 counts clipped updates, but its rule is the paper's for updates that were not clipped; the sign corrects that
    wrapped.clip_norm_lr = -norm_learning_rate
    return wrapped


CENTRAL_KINDS = {"fixed": clip_fixed, "adaptive": clip_adaptively}


def wrap(inner: Strategy, drawn: int, central: Mapping[str, Any]) -> "CentralPrivacy":
    """Wrap `inner` so that updates are clipped and noise is added as in the table `strategy.central` of an experiment.

    drawn: number of clients per round. central: the table, with `kind` ("fixed" by default, or "adaptive") and the arguments of
    `clip_fixed` or `clip_adaptively`. Raises ValueError for unknown or missing keys and for values out of range.
    """
    if not isinstance(central, Mapping):
        raise ValueError(
            'strategy.central must be a table such as { kind = "fixed", noise_multiplier = 1.0, clipping_norm = 1.0 }, '
            f"with kind fixed or adaptive, got {central!r}"
        )
    given = {"kind": "fixed", **central}
    kind = given.pop("kind")
    if not isinstance(kind, str) or kind not in CENTRAL_KINDS:
        raise ValueError(f"strategy.central.kind must be one of {', '.join(CENTRAL_KINDS)}, got {kind!r}")
    bound = bind_arguments("strategy.central", CENTRAL_KINDS[kind], inner, drawn, given=given, hidden=2)
    return CentralPrivacy(CENTRAL_KINDS[kind](**bound))


class CentralPrivacy(Wrapper):
    """A wrapper of what `clip_fixed` or `clip_adaptively` returns, which corrects the noise and the weights of clients.

    - All clients have the same weight. With weights by number of examples, one client could change the mean more than the noise
      hides.
    - The noise is scaled for the number of clients that answered, and for the clipping norm that was used on their updates.
    - If a client fails, the others are still aggregated, whereas Flower would discard the round.
    """

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        answered = [message for message in replies if not message.has_error()]
        if not answered:
            return None, None
        for message in answered:
            message.content[records.METRICS_KEY] = MetricRecord({records.NUM_EXAMPLES_KEY: 1})
        wrapped: Any = self.inner
        for message in answered:
            _lengthen(message.content[records.WEIGHTS_KEY], wrapped.current_arrays)
        wrapped.num_sampled_clients = len(answered)
        norm = wrapped.clipping_norm
        aggregated, metrics = wrapped.aggregate_train(server_round, answered)
        return self._complete(aggregated, norm, len(answered)), metrics

    def _complete(self, aggregated: ArrayRecord | None, norm: float, answered: int) -> ArrayRecord | None:
        """Return `aggregated` plus the noise that it lacks for the clipping norm `norm`; None if `aggregated` is None.

        norm: clipping norm of this round's updates. answered: number of aggregated clients.
        With an adaptive norm, Flower updates the norm before it draws the noise, so that the noise has the standard deviation for
        the next round's norm. If the next norm is smaller than `norm`, independent noise is added so that the variances sum to
        the variance for `norm`. If the next norm is larger, the excess noise stays.
        """
        wrapped: Any = self.inner
        missing = norm**2 - wrapped.clipping_norm**2
        if aggregated is None or missing <= 0 or not wrapped.noise_multiplier:
            return aggregated
        std = wrapped.noise_multiplier * math.sqrt(missing) / answered
        noisy = {}
        for key, array in aggregated.items():
            values = array.numpy()
            noisy[key] = Array(np.asarray(values + np.random.normal(0, std, values.shape).astype(values.dtype)))
        return ArrayRecord(noisy)


def _lengthen(arrays: Any, start: ArrayRecord) -> None:
    """Change one entry of a client's weights in `arrays` slightly, in place, if the norm of the update is computed as 0.

    Flower divides by this norm. The update is `arrays` minus the global weights `start`; its computed norm is also 0 if the
    squares of small values are rounded to 0.
    """
    if _compute_length(records.read_array(array) - records.read_array(start[key]) for key, array in arrays.items()):
        return
    key = next(key for key, array in arrays.items() if records.read_array(array).size)
    moved, before = arrays[key].numpy(), records.read_array(start[key])
    at = np.unravel_index(np.argmin(np.abs(moved)), moved.shape)
    step = np.spacing(np.abs(moved[at]))
    while not _compute_length([moved[at] - before[at]]):
        moved[at] += step
        step *= 2
    arrays[key] = Array(moved)


def _compute_length(update: Iterable[Any]) -> float:
    """Return the L2 norm of an update as Flower computes it; it may be 0 for tiny values, whose squares are rounded to 0."""
    return math.sqrt(sum(np.linalg.norm(np.ravel(values)) ** 2 for values in update))


def _check(noise_multiplier: float, clipping_norm: float) -> None:
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"strategy.central.noise_multiplier must be finite and not negative, got {noise_multiplier}")
    if not 0 < clipping_norm < math.inf:
        raise ValueError(f"strategy.central.clipping_norm must be positive and finite, got {clipping_norm}")
