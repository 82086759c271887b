"""Observations in memory: a gradient of the user's own model, as an honest-but-curious server would see it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from defenses.spec import DefenseSpec
from fedsim import models
from fedsim.recording import DataSpec, Observation, Training
from fedsim.recording.codec import encode
from fedsim.recording.observation import convert_to_float32

KNOWN_LOSSES: tuple[tuple[object, str], ...] = (
    (nn.CrossEntropyLoss, "cross_entropy"),
    (nn.functional.cross_entropy, "cross_entropy"),
    (nn.BCEWithLogitsLoss, "logistic"),
    (nn.functional.binary_cross_entropy_with_logits, "logistic"),
)
ACCEPTED_LOSSES = "'cross_entropy', 'logistic', torch.nn.CrossEntropyLoss() or torch.nn.BCEWithLogitsLoss()"


def observe(
    model: nn.Module,
    loss: str | nn.Module | Callable[..., Tensor],
    gradient: Mapping[str, Tensor] | Sequence[Tensor],
    *,
    shape: Sequence[int],
    num_examples: int = 1,
    num_classes: int | None = None,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    defense: str = "",
) -> Observation:
    """Return an observation: the knowledge of a server that sent `model` to a client and received `gradient`. Both are copied.

    loss:         'cross_entropy' (one logit per class) or 'logistic' (a single logit), or PyTorch's module or function for one of
                  these losses.
    gradient:     dL/dw by parameter name, or in the order of `model.parameters()`, as `torch.autograd.grad` returns it.
    shape:        shape of one example: (C, H, W) for images, (F,) for table rows, with values in [0, 1].
    num_examples: batch size behind the gradient. The loss is the mean over the batch, or the sum if `loss` is a module with
                  reduction="sum".
    num_classes:  by default the number of logits, or two for a single logit.
    mean, std:    the model's input is (x - mean) / std of values x in [0, 1]; one value, or one per channel.
    defense:      defense that the client has applied to the negative of the mean loss's gradient, such as "clip(1) |
                  gaussian(0.01)".

    The client's network was in the mode that `model` is in, train or eval.
    Raises ValueError if the gradient does not fit the model or is not finite, if the loss is not supported, if the model does not
    map examples of `shape` to logits for the classes, if `num_examples` is below 1, or if `defense` is invalid.
    """
    kind, reduction = _identify_loss(loss)
    if num_examples < 1:
        raise ValueError(f"num_examples must be at least 1, got {num_examples}")
    weights = {name: w.detach().cpu().clone() for name, w in model.named_parameters()}
    scale = 1 / num_examples if reduction == "sum" else 1.0
    update = {name: -scale * g for name, g in _name_gradients(gradient, weights).items()}
    data = DataSpec(
        shape=tuple(shape), num_classes=num_classes or _count_classes(model, tuple(shape)), mean=tuple(mean), std=tuple(std)
    )
    spec = models.ModuleSpec.of(model)
    models.build_layout(spec, data)
    buffers = dict(model.named_buffers())
    mode: Literal["train", "eval"] = "train" if model.training else "eval"
    training = Training(learning_rate=1.0, batch_size=num_examples, steps=1, loss=kind, mode=mode)
    return Observation(
        round=1,
        client="client",
        cohort=("client",),
        num_examples=num_examples,
        model=spec,
        data=data,
        training=models.adopt_precision(model, training),
        defenses=DefenseSpec.parse(defense, learning_rate=1.0),
        weights=convert_to_float32(weights),
        payload=encode(convert_to_float32(update)),
        buffers=convert_to_float32({name: buffers[name].detach().cpu().clone() for name in models.list_buffers(model)}),
    )


def _identify_loss(loss: str | nn.Module | Callable[..., Tensor]) -> tuple[Any, str]:
    """Return the name of a loss, and its reduction over the batch, such as "mean". Raises ValueError if it is not supported."""
    if isinstance(loss, str):
        models.find_loss(loss)
        return loss, "mean"
    name = next((name for known, name in KNOWN_LOSSES if loss is known or type(loss) is known), None)
    if name is None:
        raise ValueError(f"loss must be {ACCEPTED_LOSSES}, got {loss!r}")
    changed = {"weight": None, "pos_weight": None, "label_smoothing": 0.0, "ignore_index": -100}
    for key, default in changed.items():
        if (value := getattr(loss, key, default)) is not default and value != default:
            raise ValueError(
                f"loss has {key}={value!r}, which attacks cannot simulate; leave {key} at its default, {default}, or name the "
                f"loss as {name!r}, which then fits the gradient less closely"
            )
    reduction = str(getattr(loss, "reduction", "mean"))
    if reduction not in ("mean", "sum"):
        raise ValueError(f"loss has reduction={reduction!r}, and a gradient belongs to one number; use 'mean' or 'sum'")
    return name, reduction


def _name_gradients(gradient: Mapping[str, Tensor] | Sequence[Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of the gradient by parameter name, on the CPU and in the dtype of the weights.

    gradient: tensors by parameter name, or in the order of `weights`.
    Raises ValueError if names or shapes differ from those of the weights, or a value is not finite.
    """
    if not isinstance(gradient, Mapping):
        if len(gradient) != len(weights):
            raise ValueError(
                f"the gradient has {len(gradient)} tensors, and the model has {len(weights)} parameters; give one tensor per "
                "parameter"
            )
        gradient = dict(zip(weights, gradient, strict=True))
    if unmatched := sorted(gradient.keys() ^ weights.keys()):
        where = "the gradient" if unmatched[0] in gradient else "the model"
        raise ValueError(
            f"gradient and model have parameters of different names: {unmatched[0]!r} is in {where} alone; give the gradient of "
            "this model"
        )
    for name, w in weights.items():
        g: Any = gradient[name]
        if not isinstance(g, Tensor):
            raise ValueError(
                f"the gradient of {name} is of type {type(g).__name__} instead of a tensor; if the loss does not depend on it, "
                "give zeros"
            )
        if g.shape != w.shape:
            raise ValueError(f"the gradient of {name} has shape {tuple(g.shape)}, and the parameter {tuple(w.shape)}")
        if not torch.isfinite(g).all():
            raise ValueError(f"the gradient of {name} holds NaN or infinity; compute it from a finite loss")
    return {name: gradient[name].detach().cpu().to(w.dtype).clone() for name, w in weights.items()}


def _count_classes(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the number of classes: the number of logits of a forward pass, or 2 for a single logit.

    Raises ValueError if the model does not take examples of this shape, or does not return logits (N, K).
    """
    module = models.ModuleSpec.of(model).module.eval()
    parameter = next(module.parameters())
    with torch.no_grad():
        try:
            logits = module(torch.zeros(1, *shape, dtype=parameter.dtype))
        except RuntimeError as error:
            raise ValueError(
                f"the model fails on an input of shape {(1, *shape)}; correct the argument shape, the shape of one example "
                f"without the batch dimension: {error}"
            ) from None
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        returned = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ValueError(
            f"the model must return one tensor of logits of shape (N, K) for N examples, but returns {returned} for one "
            "example; wrap it in a module that returns only the logits"
        )
    return max(2, logits.shape[1])
