"""Functions that compute gradients of a network's mean loss, by torch.func, or by autograd for networks it does not support."""

import logging
import warnings
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from attacker.attacks.networks.forward import run_forward_pass
from attacker.attacks.networks.opaque import call_opaquely
from defenses.rules import Gradient, GradientProblem, GradientRule, Weights, plain
from fedsim import models
from fedsim.models.losses import Loss
from fedsim.recording.observation import DataSpec

log = logging.getLogger(__name__)


NO_BUFFERS: Weights = MappingProxyType({})
PLAIN_RULE = plain()


class Gradients(Protocol):
    """Protocol of a function that returns the gradient of the mean loss, or what a gradient rule makes of it, by parameter name.

    weights, buffers: of the model, by name. x: examples (N, *shape) in [0, 1]. y: labels (N,), or probabilities (N, K).
    """

    def __call__(self, weights: Weights, x: Tensor, y: Tensor, buffers: Weights = NO_BUFFERS) -> Gradient: ...


def build_gradient(model: nn.Module, data: DataSpec, loss: str = "cross_entropy", rule: GradientRule | None = None) -> Gradients:
    """Return a function that computes the gradient of the mean loss from weights, examples, labels and buffers, see `Gradients`.

    The function can be called under `vmap` and `torch.func.grad`, also for networks that do not support these transforms, unless
    the rule computes a gradient of each example, as DP-SGD does.

    loss: name of the loss. rule: the clients' way to compute gradients, such as DP-SGD; None for the plain gradient.
    With any rule, the loss includes the terms that the network itself adds, such as the KL divergence of a variational
    bottleneck. Without a rule, the loss does not include these terms.
    """
    penalised = rule is not None
    if (rule or PLAIN_RULE).expected is PLAIN_RULE.expected and explain_vmap_failure(model, data, loss):
        return _build_by_plain_pytorch(model, data, models.find_loss(loss), penalised)
    return _build_by_torch_func(model, data, models.find_loss(loss), rule or PLAIN_RULE, penalised)


def _build_by_torch_func(model: nn.Module, data: DataSpec, measure: Loss, rule: GradientRule, penalised: bool) -> Gradients:
    def compute_gradient(weights: Weights, x: Tensor, y: Tensor, buffers: Weights = NO_BUFFERS) -> Gradient:
        def forward(weights: Weights, x: Tensor) -> Tensor:
            return run_forward_pass(model, {**buffers, **weights}, data.normalise(x))

        return rule.expected(GradientProblem(model, forward, measure, penalised), weights, x, y)

    return compute_gradient


def _build_by_plain_pytorch(model: nn.Module, data: DataSpec, measure: Loss, penalised: bool) -> Gradients:
    """Return a gradient function that uses ordinary autograd on contiguous weights. Under `vmap` this is a loop over problems.

    measure: loss of logits and labels. penalised: whether the loss includes the terms that the network itself adds.
    """

    def compute_gradient(weights: Weights, x: Tensor, y: Tensor, buffers: Weights = NO_BUFFERS) -> Gradient:
        names, buffer_names = tuple(weights), tuple(buffers)

        def differentiate(x: Tensor, y: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            searched = any(t.requires_grad for t in (x, y, *tensors))
            copies = {name: t.clone() for name, t in zip(buffer_names, tensors[len(names) :], strict=True)}
            with torch.enable_grad():
                contiguous = [t.contiguous() for t in tensors[: len(names)]]
                parameters = dict(
                    zip(names, (t if t.requires_grad else t.detach().requires_grad_() for t in contiguous), strict=True)
                )

                def forward(weights: Weights, x: Tensor) -> Tensor:
                    return run_forward_pass(model, {**copies, **weights}, data.normalise(x.contiguous()))

                value = GradientProblem(model, forward, measure, penalised).compute_loss(parameters, x, y)
                return torch.autograd.grad(value, list(parameters.values()), create_graph=searched, materialize_grads=True)

        return dict(zip(names, call_opaquely(differentiate, x, y, *weights.values(), *buffers.values()), strict=True))

    return compute_gradient


def predict(model: nn.Module, data: DataSpec, loss: str, weights: Weights, x: Tensor, buffers: Weights) -> Tensor:
    """Return the logits (N, K) for x (N, *shape) in [0, 1].

    The function can also be called under torch.func's transforms for networks that do not support these transforms.
    loss: name of the loss, which `explain_vmap_failure` uses to test the network; the loss does not change the logits.
    """
    if not explain_vmap_failure(model, data, loss):
        return run_forward_pass(model, {**buffers, **weights}, data.normalise(x))
    names = (*buffers, *weights)

    def compute_logits(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (run_forward_pass(model, dict(zip(names, tensors, strict=True)), data.normalise(x.contiguous())),)

    return call_opaquely(compute_logits, x, *buffers.values(), *weights.values())[0]


MAX_VMAP_WEIGHTS = 3e7
"""Number of weights above which `vmap` is not used: it takes as long as a loop over problems, and far more memory."""

AGREEMENT_TOLERANCE = 1e-2
"""Relative difference up to which two implementations of gradients count as equal. This tolerance is far above rounding errors,
including errors that switch a ReLU, and far below the difference that a wrong formula makes."""


def explain_vmap_failure(model: nn.Module, data: DataSpec, loss: str, *, any_size: bool = False) -> str:
    """Return why the gradients of a network cannot or should not be computed by torch.func, as text; else "".

    A network of at most `MAX_VMAP_WEIGHTS` weights is tested: its gradients under `vmap`, and their derivatives by the examples,
    are compared with the results of ordinary autograd on two problems of two examples each, and the outcome is cached. The test
    also fails if PyTorch warns. A larger network is refused without a test, unless `any_size` is set.
    """
    shapes = tuple((name, tuple(p.shape)) for name, p in model.named_parameters())
    if not any_size and sum(p.numel() for p in model.parameters()) > MAX_VMAP_WEIGHTS:
        return f"it has more than {MAX_VMAP_WEIGHTS:.0e} weights"
    return _find_vmap_failure(_Network(model, (type(model), repr(model), shapes)), data, loss)


class _Network:
    """A network as a key of the cache of `_find_vmap_failure`, which keeps the outcome of its test as text, and no gradients.

    It is equal to the key of another network with the same class, printed layers (`repr`) and parameter shapes.
    """

    def __init__(self, model: nn.Module, key: tuple[object, ...]) -> None:
        self.model, self.key = model, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Network) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=16)
def _find_vmap_failure(network: _Network, data: DataSpec, loss: str) -> str:
    model, measure = network.model, models.find_loss(loss)
    network.model = nn.Identity()  # lru_cache keeps the key, which then holds no weights
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch warns where it falls back to a slow loop
            warnings.filterwarnings("ignore", "torch.utils.checkpoint")  # it warns of a missing argument use_reentrant
            expected = evaluate_test_problems(_build_by_plain_pytorch(model, data, measure, False), model, data, loop=True)
            under_vmap = evaluate_test_problems(_build_by_torch_func(model, data, measure, PLAIN_RULE, False), model, data)
        reason = "" if is_close(under_vmap, expected) else "its gradients under vmap differ from those of plain PyTorch"
    except Exception as error:  # a user's network may fail in any way
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if reason:
        log.warning("%s is attacked by plain PyTorch, one case after the other: %s", type(model).__name__, reason)
    return reason


Probed = tuple[Gradient, Tensor]
"""Gradients (P, *shape) of P test problems by parameter name, and the derivative of their squared norm by x, (P, N, *shape)."""


def draw_test_problems(model: nn.Module, data: DataSpec) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    """Return weights, buffers, x (2, 2, *shape) and y (2, 2): two problems of two examples each, to test gradient functions on.

    Both problems have the same weights and buffers. The weights are the model's plus noise, so that no parameter is all zeros.
    The buffers are the model's. x is random in [0, 1].
    """
    rng = torch.Generator().manual_seed(0)
    weights = {name: p.detach() + 0.02 * torch.randn(p.shape, generator=rng).to(p) for name, p in model.named_parameters()}
    saved = models.list_buffers(model)
    buffers = {name: b for name, b in model.named_buffers() if name in saved}
    some = next(iter(weights.values()))
    x = torch.rand(2, 2, *data.shape, generator=rng).to(some)
    return weights, buffers, x, torch.tensor([[0, 1], [1, 1]], device=some.device)


def evaluate_test_problems(gradient: Gradients, model: nn.Module, data: DataSpec, *, loop: bool = False) -> Probed:
    """Return the gradients on the problems of `draw_test_problems`, and the derivative of their squared norm by x.

    They are computed under `vmap`, or one by one if `loop` is set.
    """
    weights, buffers, x, y = draw_test_problems(model, data)

    def compute_squared_norm(x: Tensor, y: Tensor) -> tuple[Tensor, Gradient]:
        gradients = gradient(weights, x, y, buffers)
        return squared_norm(gradients), gradients

    function = grad_and_value(compute_squared_norm, has_aux=True)
    if not loop:
        slope, (_, gradients) = vmap(function)(x, y)
        return gradients, slope
    rows = [function(*problem) for problem in zip(x, y, strict=True)]
    return {name: torch.stack([row[1][1][name] for row in rows]) for name in weights}, torch.stack([row[0] for row in rows])


def squared_norm(gradient: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of squares over all entries of all parameters, 0-d."""
    return torch.stack([g.square().sum() for g in gradient.values()]).sum()


def is_close(computed: Probed, expected: Probed) -> bool:
    """Return whether the results of `evaluate_test_problems` agree.

    The gradient of each parameter may differ by `AGREEMENT_TOLERANCE` times its norm, or times 1e-4 of the norm of all gradients
    together if that is larger. The derivative by x may differ by `5 * AGREEMENT_TOLERANCE` times its norm.
    """
    gradients, slopes = (computed[0], expected[0]), (computed[1], expected[1])
    whole = squared_norm(gradients[1]).sqrt()
    pairs: list[tuple[Tensor, Tensor]] = [(gradients[0][name], g) for name, g in gradients[1].items()]
    gradients_agree = all(bool((f - e).norm() <= AGREEMENT_TOLERANCE * torch.maximum(e.norm(), 1e-4 * whole)) for f, e in pairs)
    return gradients_agree and bool((slopes[0] - slopes[1]).norm() <= AGREEMENT_TOLERANCE * 5 * slopes[1].norm())
