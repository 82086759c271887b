"""Inputs of a first linear layer in closed form, for one example or a whole batch.

    dL/dW = D^T X,  dL/db = D^T 1

with X the inputs (B, F), and D = dL/dz (B, width) the gradient at the layer's outputs. Three methods, by what is known:

ratio:             for one example, the ratio of the two gradients (Aono et al. 2017; Phong et al. 2018).
isolated:          for each example that is the only one to activate some neuron followed by a ReLU.
sparse directions: for all examples, from the zeros that ReLU causes in D (Dimitrov et al. 2024). The directions are found by
                   random samples; in large batches of a network with one hidden layer, by the values that D takes.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import Generator, Tensor

from attacker.attacks.closed_form.linear.constant_modulus import build_templates
from attacker.attacks.closed_form.linear.isolation import recover_isolated
from attacker.attacks.closed_form.linear.layer_gradient import LayerGradient, LinearAnswer, augment, build_empty_answer
from attacker.attacks.closed_form.linear.low_rank import Factors, factorise
from attacker.attacks.closed_form.linear.single_example import recover_rank_one, recover_single
from attacker.attacks.closed_form.linear.whole_batch import DirectionSearch, note_fewer, recover_batch
from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.layers import Layer
from defenses.base import Tensors

MAX_SAMPLES = 2**15
"""Largest number of random samples in the search for sparse directions. Batches above `sparse.LARGE_BATCH` draw fewer."""


def recover_linear(
    chain: Chain,
    weights: Tensors,
    gradient: Tensors,
    examples: int | None,
    rng: Generator,
    *,
    bounds: tuple[Tensor, Tensor] | None = None,
    samples: int = MAX_SAMPLES,
) -> LinearAnswer:
    """Recover the examples of one batch from the gradient of the chain's first layer, computing in float64.

    weights, gradient: by name, of one observation. examples: number of examples in the batch, or None if unknown.
    bounds:  lowest and highest possible normalised inputs, of any shape with F values. Without them, an example that was computed
             from a single neuron is not returned. If they have the shape (C, H, W), examples are also recognised by 8-bit values.
    samples: largest number of random samples in the search for sparse directions.
    A gradient that is zero or not finite gives an answer without examples, and no error.
    """
    layer = chain.layers[0]
    if (reason := _explain_refusal(layer, gradient)) is not None:
        return build_empty_answer(layer, reason)
    return recover_from_layer(
        LayerGradient.of_first_layer(chain, weights, gradient, bounds),
        examples,
        rng,
        samples=samples,
        templates=lambda: build_templates(chain, weights, bounds),
    )


def recover_from_layer(
    gradient: LayerGradient,
    examples: int | None,
    rng: Generator,
    *,
    samples: int = MAX_SAMPLES,
    templates: Callable[[], Tensor | None] = lambda: None,
) -> LinearAnswer:
    """Recover the examples of one batch from the gradient of a linear layer that sees them, see `recover_linear`.

    templates: function that returns known values which the gradient takes, see `DirectionSearch`, or None.
    """
    layer = gradient.layer
    if examples == 1:
        return replace(recover_single(gradient), ambiguous=gradient.shares_direction)
    factors = factorise(gradient.rows, examples)
    if factors is not None and factors.rank == 1:
        alone = recover_rank_one(gradient, note_fewer(1, examples))
        eight_bit = bool(gradient.is_eight_bit(alone.x).any())  # the values of a mixture have more than 8 bits
        if gradient.shares_direction and not eight_bit:
            return build_empty_answer(layer, _explain_shared_direction(layer, examples), rank=1)
        return alone
    if layer.activation.name != "relu":
        return build_empty_answer(layer, _explain_missing_zeros(layer), rank=factors.rank if factors else 0)
    if factors is None or factors.saturated:
        return recover_isolated(gradient, examples, _explain_missing_rank(gradient.rows, examples, factors))
    return recover_batch(gradient, factors, examples, DirectionSearch(templates=templates(), rng=rng, samples=samples))


def _explain_refusal(layer: Layer, gradient: Tensors) -> str | None:
    if layer.kernel is not None:
        return f"its first layer, {layer.name}, is a convolution, and a linear layer is needed"
    before, after = prod(layer.inputs), prod(layer.product_inputs)
    if before != after:
        return f"pooling before its first layer, {layer.name}, reduces {before} input values to {after}"
    rows = augment(layer, gradient)
    if not bool(torch.isfinite(rows).all()):
        return f"the gradient of layer {layer.name} contains NaN or infinite values"
    if not bool((rows != 0).any()):
        return f"the gradient of layer {layer.name} is zero: no example activates any neuron"
    return None


def _explain_shared_direction(layer: Layer, examples: int | None) -> str:
    return (
        f"the gradient of layer {layer.name or 'one'} has rank 1 for {examples or 'an unknown number of'} examples, as it has "
        "for any examples whose errors are parallel at its outputs, so that the examples cannot be separated: any answer would "
        "be a mixture of them"
    )


def _explain_missing_zeros(layer: Layer) -> str:
    what = "no activation" if layer.activation.name == "identity" else layer.activation.name
    return (
        f"layer {layer.name or 'one'} is followed by {what}, which causes no zeros in the gradient, and without zeros the "
        "examples of a batch cannot be separated: any answer would be a mixture of them"
    )


def _explain_missing_rank(rows: Tensor, examples: int | None, factors: Factors | None) -> str:
    if factors is not None:
        return (
            f"the gradient of the first layer has full rank, {factors.rank}: the batch may have more examples than that, which "
            "cannot be separated"
        )
    zeros = float((rows == 0).double().mean())
    why = (
        f"more examples than neurons or input values, noise, several steps, or entries that were not sent ({zeros:.0%} are zero)"
    )
    return f"the gradient of the first layer has no clear rank, as that of {examples or 'few'} examples would have; causes: {why}"
