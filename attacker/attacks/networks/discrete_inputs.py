"""Tests for networks that read their inputs as whole numbers, such as tokens that index the rows of an embedding."""

import torch
from torch import nn

from attacker.attacks.networks.forward import record_calls
from fedsim import models
from fedsim.models.built_in import BUILT_IN
from fedsim.recording.observation import DataSpec, ModelSpec

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def is_differentiable(spec: ModelSpec, data: DataSpec) -> bool:
    """Return whether autograd connects the outputs of the network with its inputs, so that a search by gradients can change them.

    Autograd does not connect them if the inputs, or some of them, are converted to integers, for example to index an embedding.
    True also if the network raises an error for inputs of zeros or ones, which the attack then reports.
    """
    key = repr((spec, data))
    if key not in _FOUND or spec.name not in BUILT_IN:
        layout = models.build_layout(spec, data)
        embeds = any(isinstance(module, EMBEDDINGS) for module in layout.modules())
        _FOUND[key] = has_real_inputs(layout, data) and not (embeds and _reads_tokens(spec, data))
    return _FOUND[key]


def _reads_tokens(spec: ModelSpec, data: DataSpec) -> bool:
    try:
        return bool(find_token_embeddings(models.build(spec, data), data))
    except Exception:  # a network that is not built in may raise anything
        return False


_FOUND: dict[str, bool] = {}
"""Cache of `is_differentiable`, which is called for every update: results for built-in networks, by the text of the arguments."""


def has_real_inputs(model: nn.Module, data: DataSpec) -> bool:
    """Return whether some values of an example enter the network as real numbers, so that its outputs change continuously.

    True also if the network raises an error for inputs of zeros. `model` is set to evaluation mode, with frozen parameters.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x = torch.zeros(2, *data.shape, device=device, requires_grad=True)
    try:
        return model.eval().requires_grad_(False)(x).requires_grad is True
    except Exception:  # a network that is not built in may raise anything
        return True


def find_token_embeddings(model: nn.Module, data: DataSpec) -> dict[str, int]:
    """Return the embeddings whose rows are chosen by the inputs: a dict from the name of the weight (V, D) to V.

    They receive other indices for inputs of all ones than for inputs of all zeros, unlike embeddings of positions.
    data: gives the shape of the inputs. `model` is set to evaluation mode.
    Raises what `model` raises for these two inputs, which are assumed to be valid.
    """
    model = model.eval()
    named = {name: module for name, module in model.named_modules() if isinstance(module, EMBEDDINGS)}
    with torch.no_grad(), record_calls(named) as seen:
        for value in (0.0, 1.0):
            model(torch.full((2, *data.shape), value))
    indices = {name: [index for index, _ in seen[name]] for name in named if name in seen}
    differing = [name for name, calls in indices.items() if any(not torch.equal(index, calls[0]) for index in calls[1:])]
    return {f"{name}.weight": named[name].num_embeddings for name in differing}
