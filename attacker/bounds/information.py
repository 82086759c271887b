"""The Fisher information that messages with noise hold on the examples they were computed from, as a linear operator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoisyMessage:
    """A message with independent noise on each coordinate.

    simulate: maps examples x (N, *shape) to the message without noise, (M,); differentiable.
    std:      standard deviation of Gaussian noise, or the scale b of Laplace noise; (M,) or 0-d; positive. Both kinds of noise
              enter in the same way, since Laplace noise of scale b has the same Fisher information as Gaussian noise of standard
              deviation b.
    """

    simulate: Callable[[Tensor], Tensor]
    std: Tensor


class FisherInformation:
    """The information `sum over messages of J^T diag(1 / std^2) J` at examples x, where J is the Jacobian of a message.

    The messages may be of several rounds. Products with vectors need neither J nor the information as a matrix. Examples are
    flattened and concatenated, so that a vector has `size` = x.numel() entries. Raises ValueError without messages.
    """

    def __init__(self, messages: Sequence[NoisyMessage], x: Tensor) -> None:
        if not messages:
            raise ValueError("messages must hold at least one NoisyMessage, got none")
        self.shape, self.size = x.shape, x.numel()
        self._parts = [_Linearised(message, x) for message in messages]

    def multiply(self, vector: Tensor) -> Tensor:
        """Return the product of the information with a vector (size,)."""
        return torch.stack([part.multiply(vector.reshape(self.shape)).flatten() for part in self._parts]).sum(dim=0)

    def to_dense(self) -> Tensor:
        """Return the information as a symmetric matrix (size, size), by one product for each column."""
        matrix = torch.stack([self.multiply(row) for row in torch.eye(self.size, dtype=self._parts[0].dtype)])
        return (matrix + matrix.T) / 2


class _Linearised:
    """A message linearised at examples x, for products with its Jacobian J there and with the transpose of J."""

    def __init__(self, message: NoisyMessage, x: Tensor) -> None:
        self.dtype = x.dtype
        self._x = x.detach().clone().requires_grad_()
        self._sent = message.simulate(self._x)
        self._precision = message.std.detach().to(x.dtype).square().reciprocal()
        self._dual = torch.zeros_like(self._sent, requires_grad=True)
        (self._back,) = torch.autograd.grad(self._sent, self._x, self._dual, create_graph=True, materialize_grads=True)

    def multiply(self, direction: Tensor) -> Tensor:
        """Return J^T diag(1 / std^2) J times a direction of the shape of x."""
        if not self._back.requires_grad:  # the message does not depend on x
            return torch.zeros_like(direction)
        (forward,) = torch.autograd.grad(self._back, self._dual, direction, retain_graph=True, materialize_grads=True)
        (back,) = torch.autograd.grad(self._sent, self._x, forward * self._precision, retain_graph=True, materialize_grads=True)
        return back
