"""The gradient before a variational bottleneck (PRECODE, Scheliga et al. 2022), in which the client drew random values.

The outputs of the bottleneck's encoder have errors D (N, M), the derivatives of the loss by them, which depend on the draws. The
encoder's gradient is D^T H for its weight and D^T 1 for its bias, with its inputs H (N, F). For candidates, and so for known H,
the errors are found by ridge regression on the observed gradient, around the errors of a bottleneck that draws its means. The
errors also determine the gradients of all earlier parameters (variable projection, Golub & Pereyra 1973). The gradients of the
decoder and of the last layer, which contain the draws themselves, are not compared.

The first K outputs of the encoder are means of the random values, the others determine their standard deviations (`Bottleneck`).
The errors of the means depend on the draws only through the predicted probabilities, those of the deviations are multiples of the
draws. So the weight of the expected errors is larger for the means, by the ratio of both variances over the draws.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, vjp
from torch.nn.functional import softplus

from attacker.attacks.networks.forward import record_inputs, run_forward_pass
from attacker.attacks.simulation.gradients import NO_BUFFERS, explain_vmap_failure
from defenses.networks import find_encoders, take_penalty
from defenses.rules import Gradient, Weights
from fedsim import models
from fedsim.recording.observation import DataSpec

RIDGE = 0.25
"""Weight of the squared difference between the errors and the errors for mean draws, relative to the sum of the squared norms of
the rows of inputs. It was chosen on 16 images of the tuning part of benchmarks/support/splits.py, in batches of 4 and of 16; the
best weight grows with the number of examples, as this sum does."""
MAX_RATIO = 1e6
"""Largest ratio of the variances of errors; above it, matrices of single precision are singular."""
DRAWS_SEED = 730_219
"""Seed of the values with which a variance is estimated. Clients often use small seeds, and these values must not be theirs."""
MAX_SHARE_OF_FEATURES = 0.5
"""Largest number of examples, relative to the encoder's inputs and outputs; with as many candidates as inputs, any gradient can
be fitted."""


@dataclass(frozen=True)
class SolvedBottleneck:
    """The gradient before a bottleneck as a function of candidates and of the observed gradient of its encoder.

    encoder: name of the encoder, a linear layer. before: names of the parameters that affect the logits only through the inputs
    of the encoder. draws: standard normal values (N, K), with which the variance of the errors of the means is estimated.
    """

    model: nn.Module
    data: DataSpec
    loss: str
    encoder: str
    before: frozenset[str]
    draws: Tensor

    @property
    def names(self) -> tuple[str, str]:
        """Names of the encoder's weight and bias."""
        return f"{self.encoder}.weight", f"{self.encoder}.bias"

    @property
    def compared(self) -> frozenset[str]:
        """Names of the parameters whose gradients are computed: the encoder's parameters and all before the encoder."""
        return self.before | set(self.names)

    def __call__(
        self, weights: Weights, x: Tensor, y: Tensor, observed: Mapping[str, Tensor], buffers: Weights = NO_BUFFERS
    ) -> Gradient:
        """Return the gradient, by parameter name, of all parameters in `compared`, with errors that fit `observed`.

        weights, buffers: of the model, by name. x: examples (N, *shape) in [0, 1]. y: labels (N,), or probabilities (N, K).
        observed: gradient of the encoder, by name.
        """
        kept = {name: w for name, w in weights.items() if name not in self.before}

        def compute_inputs(encoder_weights: Weights) -> Tensor:
            state = {**buffers, **kept, **encoder_weights}
            return record_inputs(self.model, state, self.data.normalise(x), layer=self.encoder)[0]

        h, pull_back = vjp(compute_inputs, {name: weights[name] for name in self.before})  # type: ignore[misc]
        weight, bias = self.names
        rows = torch.cat([h, torch.ones_like(h[:, :1])], dim=1)
        outputs = rows @ torch.cat([weights[weight], weights[bias][:, None]], dim=1).T
        expected, ratio = self._compute_expected_errors({**buffers, **weights}, x, y, outputs)
        observed_rows = torch.cat([observed[weight], observed[bias][:, None]], dim=1)
        errors = _solve_errors(rows, observed_rows, expected, ratio)
        (earlier,) = pull_back(errors @ weights[weight])
        encoder_gradient = errors.T @ rows
        return {**earlier, weight: encoder_gradient[:, :-1], bias: encoder_gradient[:, -1]}

    def _compute_expected_errors(self, state: Weights, x: Tensor, y: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the errors (N, 2K) that examples have if the bottleneck draws its means, and the ratio () of variances.

        It is the variance over the draws of the errors of the deviations, divided by that of the errors of the means.
        state: weights and buffers. outputs: of the encoder, (N, 2K).
        """
        layer, measure = self.model.get_submodule(self.encoder), models.find_loss(self.loss)

        def compute_loss(shift: Tensor, at: Tensor, is_penalised: bool) -> Tensor:
            handle = layer.register_forward_hook(lambda module, args, out: out + shift)
            try:
                value = measure(run_forward_pass(self.model, state, self.data.normalise(at)), y)
                penalty = take_penalty(self.model)
            finally:
                handle.remove()
            return value if penalty is None or not is_penalised else value + penalty

        expected: Tensor = grad(compute_loss)(torch.zeros_like(outputs), x, True)
        raw = outputs.detach().chunk(2, dim=1)[1]
        shift = torch.cat([softplus(raw) * self.draws.to(raw), torch.zeros_like(raw)], dim=1)
        drawn, plain = (grad(compute_loss)(s, x.detach(), False).chunk(2, dim=1)[0] for s in (shift, torch.zeros_like(shift)))
        tiny = torch.finfo(raw.dtype).tiny
        ratio = (plain * raw.sigmoid()).square().mean() / (drawn - plain).square().mean().clamp(min=tiny)
        return expected, ratio.clamp(max=MAX_RATIO).detach()


def find_solved_bottleneck(
    model: nn.Module, data: DataSpec, weights: Weights, examples: int, loss: str
) -> SolvedBottleneck | None:
    """Return a function for the gradient before the variational bottleneck of a network; None if it cannot be solved.

    There must be one bottleneck, whose encoder gets one row per example and has at least twice as many inputs and outputs as
    there are examples. There must be parameters before the encoder, and torch.func must support the network. Parameters that also
    affect the logits on another path are not compared.
    weights: of the model in one observation, by name. examples: number of examples in that observation. loss: name of the loss.
    """
    encoders = sorted({name.rpartition(".")[0] for name in find_encoders(model)})
    if len(encoders) != 1 or explain_vmap_failure(model, data, loss, any_size=True):
        return None
    layer = model.get_submodule(encoders[0])
    assert isinstance(layer, nn.Linear)
    if examples > MAX_SHARE_OF_FEATURES * min(layer.in_features, layer.out_features):
        return None
    before = _find_before(model, data, weights, encoders[0], layer.in_features)
    draws = torch.randn(examples, layer.out_features // 2, generator=torch.Generator().manual_seed(DRAWS_SEED))
    return SolvedBottleneck(model, data, loss, encoders[0], before, draws) if before else None


def _solve_errors(rows: Tensor, observed: Tensor, expected: Tensor, ratio: Tensor) -> Tensor:
    """Return the errors D (N, M) that minimise ||D^T rows - observed||^2 + ||sqrt(ridge) * (D - expected)||^2.

    The ridge is `ratio` times larger for the first half of the errors. rows: (N, F). observed: (M, F). expected: (N, M).
    """
    gram, eye = rows @ rows.T, torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    ridges = RIDGE * gram.trace() * torch.stack([ratio, torch.ones_like(ratio)])
    solved = [
        torch.linalg.solve(gram + ridge * eye, rows @ gradient.T + ridge * half)
        for gradient, half, ridge in zip(observed.chunk(2), expected.chunk(2, dim=1), ridges, strict=True)
    ]
    return torch.cat(solved, dim=1)


def _find_before(model: nn.Module, data: DataSpec, weights: Weights, encoder: str, inputs: int) -> frozenset[str]:
    """Return the names of the parameters that the logits depend on only through the inputs of a layer.

    The set is empty if the layer does not get one row (1, inputs) for one example.
    """
    rng = torch.Generator().manual_seed(0)
    leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    state = {**{name: dict(model.named_buffers())[name] for name in models.list_buffers(model)}, **leaves}
    x = data.normalise(torch.rand(1, *data.shape, generator=rng).to(next(iter(leaves.values()))))
    h, _ = record_inputs(model, state, x, layer=encoder)
    if h.shape != (1, inputs):
        return frozenset()
    handle = model.get_submodule(encoder).register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    try:
        logits = run_forward_pass(model, state, x)
    finally:
        handle.remove()
    seen, past = (torch.autograd.grad(t.sum(), list(leaves.values()), allow_unused=True) for t in (h, logits))
    return frozenset(name for name, now, other in zip(leaves, seen, past, strict=True) if now is not None and other is None)
