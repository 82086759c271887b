"""Estimates of the number of training examples behind an update, for clients that did not report the number."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attacker.attacks.networks.forward import list_linear, record_calls, run_forward_pass
from attacker.attacks.simulation.client import build_network, compute_total_step, get_buffers
from fedsim import models
from fedsim.recording import Observation
from fedsim.recording.masked_vectors import SUM_CLIENT

MAX_ZERO_SINGULAR_VALUE = 1e-5
"""Singular values below this share of the largest one are what float32 leaves of zeros."""
ROUNDING_NORM_SHARE = 1.0
"""Singular values up to this multiple of the expected spectral norm of the rounding errors count as rounding."""

MIN_EXAMPLE_SHARE = 0.01
"""Smallest singular value, relative to an update's norm, that counts for a lower bound on the number of examples. Rounding of
matrix products to bfloat16 or TF32 leaves about 2e-4."""
MAX_RANKED_VALUES = 2**20
"""Largest number of weights of a layer whose rank is computed for a lower bound."""


@dataclass(frozen=True)
class CountEstimate:
    """An estimated number of examples behind one update, and a sentence on how it was found."""

    examples: int
    words: str


def add_estimate(observation: Observation, *, reads_update: bool = True) -> tuple[Observation, str]:
    """Return the observation with an estimated number of examples, and a sentence on how it was found; see `estimate_examples`.

    The observation is returned unchanged, with "", if at least one of these holds: the client reported the number; the update is
    a secure sum (the sum of several clients' updates); or the clients defend their updates, which hides the number.
    reads_update: False for a null, which must not use the estimate from the update.
    """
    if observation.num_examples is not None or observation.client == SUM_CLIENT or observation.defenses.steps:
        return observation, ""
    estimate = estimate_examples(observation, reads_update=reads_update)
    words = f"{estimate.words}; if this is wrong, set training.examples when you record"
    return replace(observation, num_examples=estimate.examples), words


def estimate_examples(observation: Observation, *, reads_update: bool = True) -> CountEstimate:
    """Estimate how many examples are behind an update.

    The estimate is the larger of two numbers. One is the largest rank of the update of a linear layer that sees one row per
    example, divided by the number of epochs and rounded up, since each example adds a matrix of rank one to the gradient. The
    other is the number of classes found by `_count_classes`. If the number of local steps is prescribed, the estimate is at most
    this number times the examples per step.

    A prescribed number of examples replaces the estimate: local steps times examples per step, or the examples of one step if
    clients train for whole epochs. It is returned if `reads_update` is False; if no such layer has a nonzero update; or if the
    update is not a sum of gradients, as with Adam, gradient clipping or weight decay. If the rank is the largest that the layer's
    shape allows, the larger of estimate and prescribed number is returned.
    """
    training = observation.training
    maximum = None if training.steps is None else training.steps * training.step_size
    if maximum == 1:
        return CountEstimate(1, "1 example is assumed to be behind the update: one step of a batch of 1 is prescribed")
    default = training.step_size * (training.steps or 1)
    if not reads_update:
        return CountEstimate(
            default, f"{default} examples are assumed, as many as the steps prescribe: a null must not read the update"
        )
    plain = training.is_linear and not training.weight_decay
    ranks = _measure_ranks(observation) if plain else {}
    if not ranks:
        why = "no linear layer shows their number" if plain else "clients' steps are not sums of gradients"
        return CountEstimate(
            default, f"{default} examples are assumed to be behind the update, as many as its steps prescribe: {why}"
        )
    rank, full, name = max((rank, full, name) for name, (rank, full) in ranks.items())
    count = max(-(-rank // (training.epochs or 1)), _count_classes(observation))
    if rank == full:
        taken = min(max(count, default), maximum or max(count, default))
        minimum = f"at least {count} examples are behind the update by the rank of {name}, which is as large as it can be"
        return CountEstimate(taken, f"{minimum}; {taken} are assumed")
    count = min(count, maximum or count)
    return CountEstimate(count, f"{count} examples are estimated to be behind the update, by the rank of {name}")


def _measure_ranks(observation: Observation) -> dict[str, tuple[int, int]]:
    """Return a dict from each linear layer that sees one row per example to the rank of its update and the largest possible rank.

    Layers whose update is zero or missing are left out.
    """
    model = build_network(observation)
    buffers, _ = get_buffers(model, [observation])
    x = torch.rand(2, *observation.data.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), record_calls(list_linear(model)) as seen:
        run_forward_pass(model, {**buffers, **observation.weights}, observation.data.normalise(x))
    head = models.find_head(model, observation.data)[0] if models.has_head(model, observation.data) else ""
    ranks = {}
    for name, calls in seen.items():
        inputs, _ = calls[-1]
        update = observation.update.get(f"{name}.weight")
        if inputs.ndim == 2 and len(inputs) == 2 and update is not None and bool(update.any()):
            classes = f"{name}.weight" == head and len(update) > 1  # the rows of a softmax layer's gradient add up to zero
            ranks[name] = (
                _compute_rank(update, observation.rounding.get(f"{name}.weight")),
                min(len(update) - classes, update.shape[1]),
            )
    return ranks


def measure_least_examples(observation: Observation) -> tuple[int, str]:
    """Return a lower bound on the number of examples behind an update, and the layer that shows it; (0, "") if none does.

    observation: of a client that sends whole weights; for others there is no bound.
    An example counts once for each step that uses it. The bound is the rank of the update of a linear layer in which a single
    example adds a matrix of rank one, without singular values below MIN_EXAMPLE_SHARE of the update's norm. There is no bound for
    other updates than sums of gradients, as with Adam or defenses, or weight decay over several steps, and for weights that were
    rounded to half precision.
    """
    training = observation.training
    decays = training.weight_decay > 0 and training.steps != 1
    if training.optimiser != "sgd" or observation.payload.codec != "weights" or observation.is_defended or decays:
        return 0, ""
    bounds = [(0, "")]
    for name in _list_rank_one_layers(observation):
        sent = observation.payload.tensors[name]
        if any(torch.equal(sent, sent.to(kind).to(sent.dtype)) for kind in (torch.float16, torch.bfloat16)):
            continue
        update = observation.update[name].double()
        if training.decay:
            update = update + compute_total_step(training, 1) * training.decay * observation.weights[name].double()
        minimum = MIN_EXAMPLE_SHARE * float(update.norm())
        bounds.append((_compute_rank(update, observation.rounding.get(name), minimum), name))
    return max(bounds)


def _list_rank_one_layers(observation: Observation) -> list[str]:
    """Return the weights of linear layers with at most MAX_RANKED_VALUES values in which one example's gradient has rank one.

    The gradients of two random examples are tested. One consists of zeros and ones, which are two different tokens for a network
    that reads whole numbers; real numbers from 0 to 1 would all be the token 0. A layer that sees several rows per example, or
    whose weight is used twice, fails the test. The result is empty if the network cannot be built or fails on these examples.
    """
    try:
        model = models.build(observation.model, observation.data).eval().requires_grad_(True)
        linear = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        layers = {f"{name}.weight": layer.weight for name, layer in linear if isinstance(layer.weight, nn.Parameter)}
        layers = {name: w for name, w in layers.items() if w.numel() <= MAX_RANKED_VALUES and name in observation.payload.tensors}
        rng, passed = torch.Generator().manual_seed(0), set(layers)
        numbers = torch.rand(1, *observation.data.shape, generator=rng)
        for x in (numbers, numbers.round()):
            logits = model(observation.data.normalise(x))
            loss = (logits * torch.randn(logits.shape, generator=rng)).sum()
            slopes = torch.autograd.grad(loss, list(layers.values()), allow_unused=True)
            passed &= {name for name, slope in zip(layers, slopes, strict=True) if slope is not None and _has_rank_one(slope)}
    except (ValueError, RuntimeError, TypeError, IndexError):  # code of the user's, on inputs that it may refuse
        return []
    return sorted(passed)


def _has_rank_one(slope: Tensor) -> bool:
    values = torch.linalg.svdvals(slope.double())
    return bool(values[0] > 0) and bool((values[1:] <= MAX_ZERO_SINGULAR_VALUE * values[0]).all())


def _compute_rank(update: Tensor, rounding: Tensor | None, minimum: float = 0.0) -> int:
    """Return the number of singular values of an update above those of rounding errors and above `minimum`."""
    values = torch.linalg.svdvals(update.double())
    noise = max(minimum, MAX_ZERO_SINGULAR_VALUE * float(values[0]))
    if rounding is not None:
        noise = max(
            noise, ROUNDING_NORM_SHARE * float(rounding.double().square().mean().sqrt()) * sum(side**0.5 for side in update.shape)
        )
    return int((values > noise).sum())


def _count_classes(observation: Observation) -> int:
    """Return the number of classes whose entry in the gradient of the last bias is negative, at least 1.

    It is a lower bound on the number of classes in the batch. It is 1 unless clients make exactly one local step and the last
    layer is linear and has a bias with several entries.
    """
    model = build_network(observation)
    if observation.training.steps != 1 or not models.has_head(model, observation.data):
        return 1
    bias = models.find_head(model, observation.data)[1]
    update = None if bias is None else observation.update.get(bias)
    if update is None or len(update) < 2:
        return 1
    return max(1, int((update > MAX_ZERO_SINGULAR_VALUE * update.abs().max()).sum()))
