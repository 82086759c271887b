"""Strategy that averages batch-norm statistics separately from the weights and keeps the dtypes of tensors."""

from collections.abc import Iterable

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim.flower import records
from fedsim.strategies.wrapper import Wrapper


class Averaging(Wrapper):
    """A strategy that lets `inner` aggregate only the parameters, averages buffers itself, and keeps the dtypes of all tensors.

    Buffers are averaged with the clients' `num-examples` as weights; integers are rounded. Buffers are hidden from `inner`
    because a server optimiser such as FedAdam could make a variance negative. Dtypes are restored because some of Flower's
    strategies convert float32 to float64.

    buffers: names of the tensors that are buffers.
    """

    def __init__(self, inner: Strategy, buffers: frozenset[str] = frozenset()) -> None:
        super().__init__(inner)
        self._buffers = buffers
        self._types: dict[str, np.dtype] = {}

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        self._types = {name: np.dtype(array.dtype) for name, array in arrays.items()}
        weights, buffers = self._split_buffers(arrays)
        messages = list(self.inner.configure_train(server_round, weights, config, grid))
        for message in messages:
            sent = message.content[records.WEIGHTS_KEY]
            assert isinstance(sent, ArrayRecord)
            message.content[records.WEIGHTS_KEY] = ArrayRecord({**sent, **buffers}) if buffers else sent
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        received, shares = [], []
        for message in replies:
            if not message.has_error():
                arrays, metrics = message.content[records.WEIGHTS_KEY], message.content[records.METRICS_KEY]
                assert isinstance(arrays, ArrayRecord)
                assert isinstance(metrics, MetricRecord)
                message.content[records.WEIGHTS_KEY], buffers = self._split_buffers(arrays)
                shares.append((float(metrics[records.NUM_EXAMPLES_KEY]), records.to_tensors(buffers)))  # type: ignore[arg-type]
            received.append(message)
        aggregated, metrics_ = self.inner.aggregate_train(server_round, received)
        if aggregated is None:
            return None, metrics_
        weights = {name: t.to(self._find_torch_type(name)) for name, t in records.to_tensors(aggregated).items()}
        averaged = {
            name: average([(share, tensors[name]) for share, tensors in shares], self._find_torch_type(name))
            for name in sorted(self._buffers)
        }
        return records.to_arrays({**weights, **averaged}), metrics_

    def _find_torch_type(self, name: str) -> torch.dtype:
        return torch.from_numpy(np.empty(0, self._types[name])).dtype

    def _split_buffers(self, arrays: ArrayRecord) -> tuple[ArrayRecord, ArrayRecord]:
        weights = ArrayRecord({name: array for name, array in arrays.items() if name not in self._buffers})
        return weights, ArrayRecord({name: array for name, array in arrays.items() if name in self._buffers})


def average(shares: Iterable[tuple[float, Tensor]], kind: torch.dtype) -> Tensor:
    """Return the weighted mean of tensors, in dtype `kind`; for integer dtypes it is rounded.

    shares: pairs of a weight and a tensor, at least one; the tensors have equal shapes. The weights are divided by their sum.
    """
    pairs = list(shares)
    total = sum(share for share, _ in pairs)
    mean = torch.stack([tensor.double() * (share / total) for share, tensor in pairs]).sum(dim=0)
    return (mean if kind.is_floating_point else mean.round()).to(kind)
