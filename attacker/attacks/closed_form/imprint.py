"""Reading single examples off the gradient of an imprint layer (Fowl et al. 2022, "Robbing the Fed").

All neurons of the layer measure one linear quantity of the input, and neuron i reacts if this quantity exceeds the threshold t_i.
Let G_i be the gradient of the weights of neuron i, and g_i the gradient of its bias. If the network treats the outputs of all
neurons alike, the differences G_i - G_(i+1) and g_i - g_(i+1) contain only the examples in bin i, between the thresholds t_i and
t_(i+1). If bin i holds exactly one example, the layer's input for this example is the quotient of the two differences. The
difference g_i - g_(i+1) is called the bin's bias difference here.

Behind an activation that saturates, such as hard tanh in the paper's sparse variant, neuron i only sees the examples near its
threshold, and G_i and g_i themselves take the place of the differences.
"""

from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Generator, Tensor

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.closed_form.observations import StackedObservations, observe
from attacker.attacks.needs import Need
from attacker.attacks.nulls import CaseByCase
from attacker.reconstruction import MAX_RECOVERED_MSE, Reconstruction
from fedsim.models.imprint_layers import ImprintLayer, find_imprint

ROUNDING = 2.0**-18
"""Bias difference, relative to the larger of g_i and g_(i+1), that float32 rounding of an update may leave in an empty bin."""
MIN_NOISE_RATIO = 5.0
"""Smallest bias difference of an occupied bin, as a multiple of the noise. It must also be larger than rounding, see ROUNDING."""
EMPTY_QUANTILE = 0.05
"""Quantile, over the bins, of the root mean square of G_i - G_(i+1) that is taken as the noise. At least this share
of the bins is assumed to hold no example."""
MAX_EMPTY_RATIO = 2.0
"""Largest root mean square of G_i - G_(i+1) of a bin that counts as empty, as a multiple of the noise. What g_i - g_(i+1) is in
empty bins is an error as well: of rounding, since thresholds are larger than weights, or of weight decay that is not stated."""
UNCOUNTABLE = "the bins cannot be counted: there are more of them than the examples of the update can fill"
NOT_COUNTED = "the bins do not show how many examples are below each threshold"
CERTIFIED_ERROR = 1e-3
"""Largest `ImprintedExamples.error` of a bin that counts as explained by a single example."""
CERTIFIED_CONFIDENCE = 0.99
"""Confidence in an example that explains its bin alone. A mixture of several examples explains a bin by coincidence only, once
in about a thousand cases."""
SAME_MSE = 1e-6
"""Mean squared difference up to which the contents of two bins count as the same example."""
MARGIN = 0.05
"""Distance by which reconstructed values may leave [0, 1] before they count as a mixture of several examples."""


@dataclass(kw_only=True)
class ImprintReadout(CaseByCase):
    """Attack that reads an imprint layer: at any batch size, it recovers examples that are alone between two thresholds.

    The server has inserted the layer, so this is the attack of a malicious server. A reconstruction has as many examples as there
    are behind the update: first what the occupied bins hold, which may also be mixtures, then grey images with confidence 0.
    """

    name: str = "robbing_the_fed"
    needs: frozenset[Need] = field(
        default=frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES, Need.IMPRINT_LAYER, Need.LINEAR_HEAD})
    )

    def attack_case(self, case: Case, rng: Generator) -> Reconstruction:
        started, data = perf_counter(), case.observations[0].data
        count = case.observations[0].num_examples or 0
        x = torch.full((count, *data.shape), 0.5)
        y = torch.randint(data.num_classes, (count,), generator=seed_generator(rng, case, "labels"))
        confidence = torch.zeros(count)
        examples = read_imprint(observe([case], knows_defense=False, device=self.device))
        kept = examples.rank()[:count]
        n = len(kept)
        x[:n], y[:n], confidence[:n] = (
            examples.x[kept].float().cpu(),
            examples.y[kept].cpu(),
            examples.confidence[kept].float().cpu(),
        )
        return build_reconstruction(
            case,
            x,
            y,
            attack=self.name,
            rng=rng,
            route="imprint",
            confidence=confidence,
            explained=torch.full((count,), torch.nan),
            notes=(examples.describe(count), *examples.notes),
            seconds=perf_counter() - started,
        )


@dataclass(frozen=True)
class ImprintedExamples:
    """What is read from the M occupied bins of one update. A bin holds the examples between two neighbouring thresholds.

    x:          (M, *shape), quotients of the differences: the example, if a bin holds only one; otherwise a mixture.
    y:          (M,) the label with which x explains the bin's bias difference best.
    error:      (M,) distance between the bias difference of the single example (x, y) and the observed one, relative to the
                observed one, multiplied by the number of labels: each label is one more chance that a mixture matches by
                coincidence.
    plausible:  (M,) whether x lies between the thresholds of its bin, up to 1 % of their distance, and all values of x are in
                [0, 1], up to MARGIN.
    size:       (M,) magnitude of the bias difference.
    confidence: (M,) estimated probability that the example is recovered; NaN if it is undecided.
    notes:      why it is undecided; empty if it is not.
    """

    x: Tensor
    y: Tensor
    error: Tensor
    plausible: Tensor
    size: Tensor
    confidence: Tensor
    notes: tuple[str, ...] = ()

    @property
    def certified(self) -> int:
        return int((self.plausible & (self.error <= CERTIFIED_ERROR)).sum())

    def drop_repeats(self) -> "ImprintedExamples":
        """Return the examples without those that repeat another one with the same or higher confidence, by descending rank."""
        order = self.rank().to(self.x.device)
        near = torch.cdist(self.x[order].flatten(1), self.x[order].flatten(1)).square() <= SAME_MSE * self.x[:1].numel()
        kept = order[~near.tril(-1).any(dim=1)] if len(order) else order
        return replace(
            self,
            x=self.x[kept],
            y=self.y[kept],
            error=self.error[kept],
            plausible=self.plausible[kept],
            size=self.size[kept],
            confidence=self.confidence[kept],
        )

    def rank(self) -> Tensor:
        """Return the indices of the bins by descending confidence, undecided ones as 0.5, and then by descending size."""
        ranked = self.confidence.nan_to_num(nan=0.5).tolist()
        keys = sorted(range(len(self.x)), key=lambda i: (-ranked[i], -float(self.size[i])))
        return torch.tensor(keys, dtype=torch.long)

    def describe(self, count: int) -> str:
        """Return a sentence for the notes of the reconstruction, on how well the update of `count` examples was read.

        It says how many bins hold them, and in how many bins a single example explains the gradient of the bin's bias (`error` of
        at most CERTIFIED_ERROR).
        """
        certified = int((self.error <= CERTIFIED_ERROR).sum())
        return (
            f"{len(self.x)} bins of the imprint layer hold the {count} examples of the update; in {certified} of them, a single "
            "example explains the gradient of the bin's bias"
        )


def read_imprint(observed: StackedObservations) -> ImprintedExamples:
    """Return the contents of the occupied bins of the imprint layer, for the first case of `observed`.

    Raises ValueError if the model has no imprint layer.
    """
    weights = observed.get_weights(0)
    layer = find_imprint(weights, observed.data.size)
    if layer is None:
        raise ValueError(
            "this model has no imprint layer, which a malicious server adds to read examples off its gradient; attack a "
            "recording of the model imprint, or choose another attack"
        )
    rows, bias = observed.gradient[layer.weight][0][layer.order], observed.gradient[layer.bias][0][layer.order]
    row_steps, bias_steps = _subtract_next(rows), _subtract_next(bias)
    differences = _read_bins(observed, layer, row_steps, bias_steps, _find_occupied(bias, row_steps, bias_steps), saturates=False)
    if 2 * differences.certified >= len(differences.x):
        return differences
    single_neurons = _read_bins(observed, layer, rows, bias, _find_occupied(bias, rows, bias), saturates=True)
    return single_neurons if single_neurons.certified > differences.certified else differences


def _read_bins(
    observed: StackedObservations,
    layer: ImprintLayer,
    row_steps: Tensor,
    bias_steps: Tensor,
    occupied: Tensor,
    *,
    saturates: bool,
) -> ImprintedExamples:
    """Return the contents of the bins with the indices `occupied`, from differences of neighbouring neurons.

    saturates: whether the activation saturates, so that `row_steps` and `bias_steps` are the gradients of single neurons. Then
    two neurons may see the same example, which is returned once, and bins are not counted.
    """
    inputs = row_steps[occupied] / bias_steps[occupied, None]
    x = observed.data.denormalise(inputs.reshape(-1, *observed.data.shape))
    plausible = ((x > -MARGIN) & (x < 1 + MARGIN)).flatten(1).all(dim=1)
    plausible &= saturates | _check_bins(inputs, occupied, layer)
    y, error = _fit_labels(observed, layer, occupied, x, bias_steps[occupied])
    bias_noise = float(bias_steps[_find_empty(row_steps)].square().mean().sqrt())
    scale = inputs.square().mean(dim=1).sqrt() * bias_noise
    noise = max(observed.data.std) * (_estimate_noise(row_steps) + scale) / bias_steps[occupied].abs()
    sees_all = float(row_steps.sum(dim=0).norm()) > ROUNDING * float(row_steps.norm())  # this sum is the lowest neuron's gradient
    count = observed.examples if sees_all and not saturates else None
    confidence = _judge(error, plausible, count, noise)
    reason = NOT_COUNTED if count is None else UNCOUNTABLE
    notes = (f"confidence is undecided for {unsure} examples: {reason}",) if (unsure := int(confidence.isnan().sum())) else ()
    examples = ImprintedExamples(x, y, error, plausible, bias_steps[occupied].abs(), confidence, notes)
    return examples.drop_repeats() if saturates else examples


def _subtract_next(values: Tensor) -> Tensor:
    """Return the differences between each row and the next one; the last row stays as it is, as no neuron is above it."""
    return values - torch.cat([values[1:], torch.zeros_like(values[:1])])


def _estimate_noise(row_steps: Tensor) -> float:
    """Return the standard deviation of the noise of a value of G_i - G_(i+1), (bins, F), from the emptiest bins."""
    return float(row_steps.square().mean(dim=1).sqrt().quantile(EMPTY_QUANTILE))


def _find_occupied(bias: Tensor, row_steps: Tensor, bias_steps: Tensor) -> Tensor:
    """Return the indices of the bins whose bias difference is more than rounding and noise.

    bias: gradients g_i of the biases, which determine the rounding. row_steps, bias_steps: the differences G_i - G_(i+1) and
    g_i - g_(i+1), which determine the noise.
    """
    magnitude = torch.maximum(bias.abs(), torch.cat([bias[1:], torch.zeros_like(bias[:1])]).abs())
    floor = (ROUNDING * magnitude).clamp(min=MIN_NOISE_RATIO * _estimate_noise(row_steps))
    return ((bias_steps.abs() > floor) & ~_find_empty(row_steps)).nonzero()[:, 0]


def _find_empty(row_steps: Tensor) -> Tensor:
    """Return a mask of the bins that are empty by the differences G_i - G_(i+1), see MAX_EMPTY_RATIO."""
    return row_steps.square().mean(dim=1).sqrt() <= MAX_EMPTY_RATIO * _estimate_noise(row_steps)


def _check_bins(inputs: Tensor, occupied: Tensor, layer: ImprintLayer) -> Tensor:
    """Return a mask (M,): whether each input lies between its bin's thresholds, up to one per cent of the bin's width."""
    value = inputs @ layer.direction
    low = layer.thresholds[occupied]
    high = torch.cat([layer.thresholds[1:], torch.full_like(layer.thresholds[:1], torch.inf)])[occupied]
    slack = 0.01 * (high - low).nan_to_num(posinf=0.0) + 1e-6
    return (value >= low - slack) & (value <= high + slack)


def _fit_labels(
    observed: StackedObservations, layer: ImprintLayer, occupied: Tensor, x: Tensor, entries: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the label with which each x explains its bin's bias difference best, (M,), and `ImprintedExamples.error`, (M,).

    entries: the bias differences (M,) of the occupied bins. A single example x with label c contributes dL(x, c)/db_i / B to the
    gradient of a batch of B.
    """
    if not len(x):
        return torch.zeros(0, dtype=torch.long, device=x.device), torch.zeros(0, dtype=x.dtype, device=x.device)
    slopes = observed.differentiate_outputs(layer.bias.removesuffix(".bias"), x)  # (classes, M, neurons)
    expected = slopes[:, torch.arange(len(x), device=x.device), layer.order[occupied]] / observed.examples
    error, y = ((expected - entries).abs() / entries.abs()).min(dim=0)
    return y, error * len(expected)


def _judge(error: Tensor, plausible: Tensor, count: int | None, noise: Tensor) -> Tensor:
    """Return an estimate of the probability that the example of each occupied bin is recovered, (M,).

    It is `CERTIFIED_CONFIDENCE` where a single example explains the bias difference (`error` is at most CERTIFIED_ERROR), and 0
    for implausible bins. For other plausible bins it is a lower bound by counting. I implausible bins hold at least two of the
    `count` examples each, so that at most L = count - 2 I examples are left for the P plausible bins, of which at least 2 P - L
    then hold a single one. If C of the P plausible bins are certified, the bound is (2 P - L - C) / (P - C), clamped to [0, 1].
    If L < P, the bins are not what was assumed, and the other plausible bins are undecided (NaN).
    count: None if the bins do not show how many examples are below each threshold; the others are then undecided, too.
    noise: (M,) standard deviation of the noise in a pixel of x. If its square exceeds MAX_RECOVERED_MSE, the probability is 0,
           even where a single example explains the bias difference.
    """
    certified = plausible & (error <= CERTIFIED_ERROR)
    bins, mixed = int(plausible.sum()), int((~plausible).sum())
    if count is None or count - 2 * mixed < bins:
        open_share = torch.nan
    else:
        alone = max(0.0, (2 * bins - (count - 2 * mixed)) / max(1, bins))
        open_share = max(0.0, (alone * bins - int(certified.sum())) / max(1, bins - int(certified.sum())))
    confidence = torch.full_like(error, open_share).masked_fill(certified, CERTIFIED_CONFIDENCE)
    return confidence.masked_fill(~plausible | (noise**2 > MAX_RECOVERED_MSE), 0.0)
