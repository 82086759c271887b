"""Doubts of examples from the gradient of a first linear layer, which may be mixtures of several examples.

They may also come from clients that train otherwise than stated.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attacker.attacks.closed_form.any_loss import can_measure_any_loss
from attacker.attacks.closed_form.linear.batch_labels import LabelledExamples
from attacker.attacks.closed_form.linear.layer_gradient import LinearAnswer
from attacker.attacks.closed_form.linear.sparse import STOP_AGREEMENT
from attacker.attacks.closed_form.observations import StackedObservations
from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.layers import Layer

MAX_SINGLE_RESIDUAL = 1e-5
"""Largest share of the squared norm of the first layer's gradient that a single example leaves unexplained, besides rounding of
weights, without a defense. For four photographs of one label, behind tanh and ReLU, it was 1e-4 and 1e-2."""
MAX_AMBIGUOUS_MISFIT = 1e-3
"""Largest `LabelledExamples.misfit` at which a single example counts as the cause of a gradient that several examples may cause
as well (`LinearAnswer.ambiguous`). Above it, the confidence is undecided, unless the example has the values of an 8-bit image."""
NUM_RANDOM_INPUTS = 4000
"""Number of random inputs that are compared with an example by `is_pattern_common`."""
MAX_SHARED = 0.01
"""Largest share of random inputs that turn on the same neurons as an example at which a gradient of rank one is evidence that the
example is the only one, beside the number that the client reports."""
MAX_HIDDEN_SHARED = MAX_SHARED / 10
"""The same for a row of a batch whose gradient shows fewer examples than the batch has, since rows of one table turn on the same
neurons more often than random inputs. With four columns and two classes, four of ten rows with shares from 0.006 to 0.012 were
means of several."""
MAX_TURNED = 1e-3
"""Largest `LabelledExamples.turned` of an example of a batch that counts as explained by a label. On the tuning part, it is below
1e-6 for right examples, and above 0.1 for mixtures of two."""
MAX_HALF_TURNED = 1e-2
"""The same for clients that compute in bfloat16 or float16, whose rounding turned right examples by up to 4e-3."""
MIN_MIXED_TURN = 0.1
"""Smallest `LabelledExamples.turned` of a mixture behind a defense, if other examples of the batch are below MAX_TURNED."""
MAX_SETTLED_RESIDUAL = 1e-6
"""Largest share of the squared norm of the first layer's gradient that a single example leaves unexplained if this layer alone
settles the answer."""


def is_misstated(observed: StackedObservations, i: int, layer: Layer, batch: LabelledExamples) -> bool:
    """Return whether the gradient of the first layer is not that of the only example found, or may be that of several.

    With one output, the loss decides only a factor of the gradient, for example the squared error of a regression. If this factor
    is not that of the stated loss, it cannot show that there is a single example; the neurons that the example turns on do.
    The errors at two logits, whose sum is zero, are parallel as well, also with label smoothing.
    """
    if float(batch.misfit.max()) <= MAX_AMBIGUOUS_MISFIT:
        return False
    narrow = can_measure_any_loss(observed) and observed.data.num_classes == 2
    if not narrow or float(batch.turned.max()) > MAX_AMBIGUOUS_MISFIT:
        return True
    low, high = observed.get_input_range()
    return is_pattern_common(observed, i, (layer.weight, layer.bias), batch.x, (low.flatten(), high.flatten()))


def is_pattern_common(
    observed: StackedObservations,
    i: int,
    names: tuple[str, str | None],
    inputs: Tensor,
    ends: tuple[Tensor, Tensor],
    *,
    limit: float = MAX_SHARED,
) -> bool:
    """Return whether more than the share `limit` of random inputs of a linear layer turns on the same neurons as the example.

    Behind ReLU, the gradients of several examples are parallel only if they turn on the same neurons. Of pairs of rows of three
    tables, of which one row was below MAX_SHARED, at most 10 % did so, and 2 % with at least 32 neurons.
    names: of the layer's weight and bias. inputs: (1, F), the example's. ends: inputs (F,) of examples of zeros and of ones.
    """
    weights = observed.get_weights(i)
    bias = 0.0 if names[1] is None else weights[names[1]]
    rng = torch.Generator().manual_seed(0)
    share = torch.rand(NUM_RANDOM_INPUTS, inputs.shape[1], generator=rng, dtype=torch.float64).to(inputs.device)
    low, high = (end.to(inputs).double() for end in ends)
    on = [(each @ weights[names[0]].double().T + bias) > 0 for each in (inputs.double(), low + share * (high - low))]
    return float((on[0] == on[1]).all(dim=1).double().mean()) > limit


def find_unexplained(observed: StackedObservations, i: int, linear: LinearAnswer, batch: LabelledExamples) -> Tensor:
    """Return a mask (K,) of the examples of a batch that may be mixtures, since no label explains their part of the gradient.

    If all labels fail for all examples, clients may have another loss, and any errors at the outputs count as well. Such errors
    explain mixtures of examples that turn on the same neurons, too, so that examples are marked that share theirs with another.
    After several steps or behind a defense, the gradient of a right example may differ in other ways. Only examples with an
    agreement below STOP_AGREEMENT are marked then, and, after one step, those that differ far more than others of the batch.
    """
    if observed.examples == 1:
        return torch.zeros_like(linear.certainty, dtype=torch.bool)
    limit = MAX_TURNED if observed.training.precision == "float32" else MAX_HALF_TURNED
    off = (batch.turned > limit).to(linear.certainty.device)
    if observed.cases[i].observations[0].is_defended or observed.steps != 1:
        far = (batch.turned > MIN_MIXED_TURN).to(linear.certainty.device) & (observed.steps == 1) & (not bool(off.all()))
        return off & (linear.certainty < STOP_AGREEMENT) | far
    if not bool(off.all()):
        return off
    return (batch.beside > limit).to(linear.certainty.device) | _find_equal_patterns(observed, i, linear.x)


def find_hidden(observed: StackedObservations, i: int, layer: Layer, linear: LinearAnswer, doubtful: Tensor) -> Tensor:
    """Return a mask (K,) of the table rows that may be mixtures, since the gradient shows fewer examples than the batch has.

    The same holds if it shows as many, but a row is `doubtful`: that one may be right, and another one a mixture.

    Rows that turn on the same neurons have parallel gradients if their errors at the outputs are parallel, as with two classes,
    so that they look like one row, a mean of them. A table of few columns has many such rows, and the mean of rows of the same
    categories looks like any other row. A row is marked if more than a share MAX_HIDDEN_SHARED of random inputs turns on the same
    neurons.
    """
    is_whole = linear.rank >= observed.examples and not bool(doubtful.any())
    if observed.data.is_image or observed.examples == 1 or is_whole:
        return torch.zeros(linear.found, dtype=torch.bool, device=linear.certainty.device)
    low, high = observed.get_input_range()
    ends = low.flatten(), high.flatten()
    names = layer.weight, layer.bias
    shared = [is_pattern_common(observed, i, names, x[None], ends, limit=MAX_HIDDEN_SHARED) for x in linear.x]
    return torch.tensor(shared, dtype=torch.bool, device=linear.certainty.device)


def _find_equal_patterns(observed: StackedObservations, i: int, inputs: Tensor) -> Tensor:
    """Return a mask (N,) of the inputs (N, F) of the first layer that turn on exactly the neurons that another one turns on."""
    assert isinstance(observed.chain, Chain)
    layer, weights = observed.chain.layers[0], observed.get_weights(i)
    on = inputs.double() @ weights[layer.weight].double().T + (0.0 if layer.bias is None else weights[layer.bias]) > 0
    return (on[:, None] == on[None]).all(dim=2).sum(dim=1) > 1


def estimate_residual(observed: StackedObservations, i: int, names: Sequence[str | None]) -> float:
    """Return the largest unexplained share of the first layer's squared gradient norm that rounding may cause for one example.

    It is infinite behind a defense and where clients compute in less than float32, so that the share tells nothing.
    names: of the layer's weight and bias.
    """
    observation = observed.cases[i].observations[0]
    if observation.is_defended or observation.training.precision != "float32":
        return float("inf")
    rounded = [name for name in names if name is not None and name in observation.rounding]
    power = sum(float(observation.update[name].double().square().sum()) for name in rounded)
    rounding = sum(float(observation.rounding[name].double().square().sum()) for name in rounded)
    return MAX_SINGLE_RESIDUAL + 10 * rounding / power if power else MAX_SINGLE_RESIDUAL


def is_settled(observed: StackedObservations, i: int, linear: LinearAnswer) -> bool:
    """Return whether the first layer's gradient alone determines the examples, whatever the rest of the gradient says.

    The rest then differs only because clients train otherwise than stated, for example with another loss or learning rate. False
    if the defense adds noise, or if the norm of the inputs is unknown. `linear.ambiguous` does not matter here: for an ambiguous
    answer, the caller also checks that its values are those of an 8-bit image, which a mixture's values are not.
    """
    certainty = float(linear.certainty.min())
    if observed.examples == 1:
        return linear.scaled and is_settled_by_one(observed, i, certainty)
    return linear.scaled and observed.estimate_noise(i) == 0 and observed.steps == 1 and certainty >= STOP_AGREEMENT


def is_settled_by_one(observed: StackedObservations, i: int, certainty: float) -> bool:
    """Return whether a single example with this certainty alone explains a gradient to which no defense adds noise."""
    return observed.estimate_noise(i) == 0 and certainty >= 1 - MAX_SETTLED_RESIDUAL
