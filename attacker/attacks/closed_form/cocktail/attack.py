"""The Cocktail Party attack (Kariyappa et al. 2023): the inputs of a linear layer as independent components of its gradient."""

from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Generator, Tensor
from torch.nn import functional

from attacker.attacks.answers import build_reconstruction
from attacker.attacks.cases import Case, seed_generator
from attacker.attacks.closed_form.cocktail.components import Unmixing, keep_in_range, separate, whiten
from attacker.attacks.closed_form.cocktail.features import (
    FeatureLayer,
    find_feature_layer,
    invert_separated,
    scale_features,
    standardise_features,
)
from attacker.attacks.closed_form.cocktail.mixtures import Mixtures, differentiate_images, read_mixtures, scale_images
from attacker.attacks.closed_form.cocktail.published_loss import PublishedLoss, search_published
from attacker.attacks.closed_form.linear.low_rank import Factors, polish
from attacker.attacks.closed_form.linear.refinement import refine_directions
from attacker.attacks.closed_form.linear.zeros import find_pattern
from attacker.attacks.closed_form.observations import StackedObservations, observe
from attacker.attacks.confidence.estimates import CERTIFIED_MISFIT, judge_closed_form
from attacker.attacks.needs import Need
from attacker.attacks.networks.input_layer import find_input_layer
from attacker.attacks.nulls import CaseByCase
from attacker.reconstruction import Reconstruction
from fedsim.recording.observation import DataSpec

MAX_RESIDUAL = 3.0
"""Largest residual of a fit to zeros that explains the gradient, in standard deviations of its noise."""
MAX_EXAMPLES = 256
"""Largest number of examples that are separated."""


@dataclass(frozen=True)
class SeparatedExamples:
    """The R examples that were separated from one update.

    x:         images (R, *shape); empty as long as only the layer's inputs are known, and these are not the images.
    vectors:   [z, 1] for each input z of the layer, up to a factor, (R, F + 1); only z, (R, F), for a layer without a bias.
    certainty: (R,) 1 for examples that were refined by the zeros that ReLU causes in the gradient, 0 for the others.
    loss:      final loss of the independent component analysis, a negative mean log-likelihood or the loss of the paper.
    route:     name of the method, for the reconstruction.
    """

    x: Tensor
    vectors: Tensor
    certainty: Tensor
    loss: float
    route: str


@dataclass(kw_only=True)
class CocktailParty(CaseByCase):
    """Attack that separates the examples of a batch from a linear layer's gradient by independent component analysis.

    criterion: the loss of the separation: "likelihood", or "published" for the loss of the paper, which needs a linear layer with
               a bias that sees the images directly.
    steps:     iterations for "published", unused otherwise.
    restarts:  number of starts of the separation; the result with the lowest loss is kept.
    refine:    whether to compute exact examples from the separated ones, where the zeros that ReLU causes in the gradient allow
               it; this needs a layer with a bias.
    inversion_steps: iterations of the search for images with the separated features, if the layer does not see images directly.
    """

    name: str = "cocktail_party"
    criterion: str = "likelihood"
    steps: int = 25_000
    restarts: int = 1
    refine: bool = True
    inversion_steps: int = 400
    needs: frozenset[Need] = field(default=frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES, Need.IMAGES, Need.LINEAR_HEAD}))

    def attack_case(self, case: Case, rng: Generator) -> Reconstruction:
        started, observed = perf_counter(), observe([case], knows_defense=False, device=self.device)
        first = find_input_layer(case.observations[0].model, observed.data)
        if first is None and self.criterion == "published":
            raise ValueError(
                "criterion=published needs a linear layer with a bias whose input is the flattened image, and this model has "
                "none; set criterion=likelihood, which needs no such layer"
            )
        layer = FeatureLayer(first.weight, first.bias) if first is not None else find_feature_layer(observed)
        rows = join_bias(layer, observed.gradient)
        _check_size(observed.examples, rows)
        mixtures = read_mixtures(rows, observed.examples)
        data = first.specify_input(observed.data) if first is not None else None
        separated = self._separate(mixtures, observed, layer, seed_generator(rng, case, "separation"), data=data)
        if first is None:
            features = scale_features(separated.vectors, biased=bool(layer.bias))
            drawn = seed_generator(rng, case, "inversion")
            x = invert_separated(observed, layer, features, steps=self.inversion_steps, rng=drawn).double()
            separated = replace(separated, x=x, route=f"{separated.route}, features inverted")
        labels = find_labels(observed, layer, rows, separated.vectors, separated.x)
        return self._build(case, observed, separated, labels, rng, perf_counter() - started)

    def _separate(
        self, mixtures: Mixtures, observed: StackedObservations, layer: FeatureLayer, rng: Generator, *, data: DataSpec | None
    ) -> SeparatedExamples:
        """Return the separated inputs of the layer.

        data: if these inputs are the images, the specification that they are normalised by; if None, `x` is empty.
        """
        unmixed, whitening = self._unmix(mixtures, observed, rng, data=data, layer=layer)
        vectors = unmixed.matrix.double() @ whitening @ mixtures.basis
        x = scale_images(vectors, data) if data is not None else vectors.new_zeros(0, *observed.data.shape)
        separated = SeparatedExamples(x, vectors, vectors.new_zeros(len(vectors)), unmixed.loss, "separated")
        factors = mixtures.factors
        if not self.refine or not layer.bias or factors is None or factors.saturated or len(vectors) < mixtures.rank:
            return separated
        weights = {name: w[None] for name, w in observed.get_weights(0).items()}
        forward, constant = join_bias(layer, weights) @ factors.basis.T, factors.basis[:, -1]
        exact = refine_directions(factors, vectors @ factors.basis.T, forward, constant)
        if exact is None or not bool(exact.replaced.any()):
            return separated
        fitted = _fit_zeros(factors, join_bias(layer, observed.gradient), exact.directions.q)
        if fitted is None:
            return separated
        x = scale_images(fitted, data) if data is not None else x
        return SeparatedExamples(x, fitted, exact.replaced.to(fitted), unmixed.loss, "separated, refined by zeros")

    def _unmix(
        self, mixtures: Mixtures, observed: StackedObservations, rng: Generator, *, data: DataSpec | None, layer: FeatureLayer
    ) -> tuple[Unmixing, Tensor]:
        """Return the unmixing (R', R') with the lowest loss of all restarts, and the whitening matrix (R', R) before it.

        Both are to be applied to the R rows of the mixtures' basis, first the whitening. R' is at most R: less if the separated
        values of the mixtures are linearly dependent. data: as for `_separate`. Without it, the standardised features are
        separated. With it, the pixels (criterion "published") or the differences of neighbouring
        pixels (criterion "likelihood") are separated; for differences, the range of pixels is a second criterion.
        """
        if data is None:
            public = standardise_features(observed, layer, mixtures.basis, rng)
            return self._separate_best(public, mixtures.rank, rng)
        pixels = mixtures.basis[:, :-1]
        if self.criterion == "published":
            mean = pixels.mean(dim=1, keepdim=True)
            whitening, whitened = whiten(pixels - mean, mixtures.rank)
            loss = PublishedLoss(whitened.float(), (whitening @ mean).float(), data)
            return search_published(loss, steps=self.steps, restarts=self.restarts, rng=rng), whitening
        differences = differentiate_images(pixels, data)
        unmixing, whitening = self._separate_best(differences, mixtures.rank, rng)
        return keep_in_range(unmixing, whitening @ differences, whitening @ mixtures.basis, data), whitening

    def _separate_best(self, mixed: Tensor, rank: int, rng: Generator) -> tuple[Unmixing, Tensor]:
        whitening, whitened = whiten(mixed, rank)
        candidates = [separate(whitened, rng) for _ in range(self.restarts)]
        return min(candidates, key=lambda solution: solution.loss), whitening

    def _build(
        self,
        case: Case,
        observed: StackedObservations,
        separated: SeparatedExamples,
        labels: Tensor,
        rng: Generator,
        seconds: float,
    ) -> Reconstruction:
        misfit = observed.measure_misfit(0, separated.x, labels)
        certified = "linear" if misfit <= CERTIFIED_MISFIT else separated.route
        judged = judge_closed_form(certified, separated.x, misfit, separated.certainty, observed.data, observed.examples)
        count, num_missing = observed.examples, observed.examples - len(separated.x)
        grey, zeros = torch.full((num_missing, *observed.data.shape), 0.5), torch.zeros(num_missing)
        drawn = torch.randint(observed.data.num_classes, (num_missing,), generator=seed_generator(rng, case, "labels"))
        note = f"only {len(separated.x)} of {count} examples could be separated; the others are returned as uniformly grey images"
        notes = (note,) if num_missing else ()
        return build_reconstruction(
            case,
            torch.cat([separated.x.float().cpu(), grey]),
            torch.cat([labels.cpu(), drawn]),
            attack=self.name,
            rng=rng,
            route=separated.route,
            loss=torch.tensor([separated.loss]),
            confidence=torch.cat([judged.confidence, zeros]),
            explained=torch.cat([judged.explained, zeros]),
            evidence={name: (*values.tolist(), *([0.0] * num_missing)) for name, values in judged.evidence.items()},
            notes=(*notes, *judged.notes),
            restarts=self.restarts,
            iterations=self.steps * self.restarts if self.criterion == "published" else 0,
            seconds=seconds,
        )


def join_bias(layer: FeatureLayer, tensors: dict[str, Tensor]) -> Tensor:
    """Return weight and bias of a layer, or their gradients, of the first case: (M, F + 1), or (M, F) without a bias."""
    if not layer.bias:
        return tensors[layer.weight][0]
    return torch.cat([tensors[layer.weight][0], tensors[layer.bias][0][:, None]], dim=1)


def find_labels(observed: StackedObservations, layer: FeatureLayer, rows: Tensor, vectors: Tensor, x: Tensor) -> Tensor:
    """Return for each example the label (R,) with which its simulated gradient dL/dz fits the observed one best, by the cosine.

    z are the layer's outputs. The observed dL/dz of each example is the least-squares solution that explains `rows` by `vectors`.
    rows: gradient of the layer, (M, F + 1) with the bias as the last column, or (M, F) without one. x: images (R, *shape).
    vectors: the layer's inputs up to a factor, with a last entry for the bias, (R, F + 1), or (R, F) without a bias.
    """
    side = vectors[:, -1:] if layer.bias else vectors.sum(dim=1, keepdim=True)
    d = torch.linalg.lstsq(vectors.T, rows.T).solution * torch.where(side < 0, -1.0, 1.0).to(vectors)
    expected = observed.differentiate_outputs(layer.weight.removesuffix(".weight"), x).flatten(2)
    best: Tensor = functional.cosine_similarity(expected, d[None], dim=2).argmax(dim=0)
    return best


def _fit_zeros(factors: Factors, rows: Tensor, q: Tensor) -> Tensor | None:
    """Return the R examples as vectors [x, 1] up to a factor, (R, F + 1), given their directions q; None if q is singular.

    q: (R, R), one direction per column: a combination of the coordinates of `factors` that is zero at neurons which an example
    turns off. The vectors q^-1 V, with V the basis of the gradient's row span, are fitted to the gradient's `rows` (M, F + 1),
    with each example absent from the rows that are zero along its direction. If the root mean square residual exceeds
    `MAX_RESIDUAL` standard deviations of noise, the vectors q^-1 V are returned as they are.
    """
    p, info = torch.linalg.inv_ex(q)
    if int(info) or not bool(torch.isfinite(p).all()):
        return None
    start, live = p @ factors.basis, factors.live
    _, fitted, error = polish(rows[live], factors.noise[live], find_pattern(q, factors).on[live], start)
    return fitted if error <= MAX_RESIDUAL and bool(torch.isfinite(fitted).all()) else start


def _check_size(examples: int, rows: Tensor) -> None:
    """Raise ValueError if there are more examples than neurons, one per row of the gradient, or than MAX_EXAMPLES."""
    maximum = min(MAX_EXAMPLES, len(rows))
    if examples > maximum:
        raise ValueError(
            f"the update was computed from {examples} examples, but this attack separates at most {maximum} by the gradient of a "
            f"layer of {len(rows)} neurons; use an attack that searches, such as cpl"
        )
