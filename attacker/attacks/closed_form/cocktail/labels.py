"""Labels of separated examples, from the gradient of each at the outputs of the layer that mixes them."""

import torch
from torch import Tensor
from torch.nn import functional

from attacker.attacks.closed_form.cocktail.features import FeatureLayer
from attacker.attacks.closed_form.observations import StackedObservations
from attacker.attacks.networks.forward import run_forward_pass
from fedsim import models


def find_labels(observed: StackedObservations, layer: FeatureLayer, rows: Tensor, vectors: Tensor, x: Tensor) -> Tensor:
    """Return for each example the label (R,) with which its simulated gradient dL/dz fits the observed one best, by the cosine.

    z are the layer's outputs. The observed dL/dz of each example is the least-squares solution that explains `rows` by `vectors`.
    rows: gradient of the layer, (M, F + 1) with the bias as the last column, or (M, F) without one. x: images (R, *shape).
    vectors: the layer's inputs up to a factor, with a last entry for the bias, (R, F + 1), or (R, F) without a bias.
    """
    side = vectors[:, -1:] if layer.bias else vectors.sum(dim=1, keepdim=True)
    d = torch.linalg.lstsq(vectors.T, rows.T).solution * torch.where(side < 0, -1.0, 1.0).to(vectors)
    expected = _differentiate_outputs(observed, layer, x.clamp(0, 1))
    best: Tensor = functional.cosine_similarity(expected, d[None], dim=2).argmax(dim=0)
    return best


def _differentiate_outputs(observed: StackedObservations, layer: FeatureLayer, x: Tensor) -> Tensor:
    """Return the gradient of each example's own loss at the outputs of `layer` for every label, (classes, R, M).

    x: the examples (R, *shape) in [0, 1], as inputs of the whole network; they are normalised here.
    """
    kept: list[Tensor] = []

    def keep_output(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[-1]

    handle = observed.model.get_submodule(layer.weight.removesuffix(".weight")).register_forward_hook(keep_output)
    buffers = {name: b if observed.same_buffers else b[0] for name, b in observed.buffers.items()}
    try:
        logits = run_forward_pass(observed.model, {**observed.get_weights(0), **buffers}, observed.data.normalise(x))
    finally:
        handle.remove()
    loss, found = models.find_loss(observed.training.loss), []
    for label in range(observed.data.num_classes):
        total = len(x) * loss(logits, torch.full((len(x),), label, device=x.device))
        found.append(torch.autograd.grad(total, kept, retain_graph=True)[0].flatten(1))
    return torch.stack(found)
