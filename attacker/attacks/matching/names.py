"""Look-up of distances, optimisers, decoders and treatments of local steps by the names that users give.

Label rules are in `labels`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, get_args

from attacker.attacks.learned.enhancer import find_denoiser
from attacker.attacks.learned.prior_file import FILE_ENDING
from attacker.attacks.matching.decoders import BUILT_IN_DECODERS, DecoderFactory, autoencoder
from attacker.attacks.matching.generator_decoders import find_generated, is_generated
from attacker.attacks.matching.objectives import Distance, absolute, cosine, euclidean
from attacker.attacks.matching.priors import DenoiserTerm
from attacker.attacks.matching.simulation import LocalSteps
from attacker.attacks.optimisers.first_order import SGD, Adagrad, Adam, Optimiser
from attacker.attacks.optimisers.lbfgs import LBFGS
from defenses.registry import Registry

NamedPart = TypeVar("NamedPart")

DISTANCES: Mapping[str, Distance] = {"euclidean": euclidean, "cosine": cosine, "absolute": absolute}

OPTIMISERS: Mapping[str, tuple[Callable[[float], Optimiser], float]] = {
    "lbfgs": (lambda rate: LBFGS(learning_rate=rate), 1.0),
    "wolfe": (lambda rate: LBFGS(learning_rate=rate, line_search=True), 1.0),
    "adam": (lambda rate: Adam(learning_rate=rate, decay_at=()), 0.02),
    "momentum": (lambda rate: SGD(learning_rate=rate), 0.01),
    "adagrad": (lambda rate: Adagrad(learning_rate=rate), 0.1),
}
"""For each optimiser, a function of the learning rate and the default learning rate; `wolfe` is L-BFGS with a line search."""

DECODERS: Registry[DecoderFactory] = Registry("attacker.decoders", BUILT_IN_DECODERS)


def get_decoder(name: str) -> DecoderFactory:
    """Return the decoder factory with this name, of this `module:function`, or of a learned prior in a .safetensors file.

    An autoencoder has the name of its file. For a generator, @ and the variable that is optimised follow the file, as in
    `generator.safetensors@latents`; `generated.SEARCHES` lists these variables.
    Raises ValueError for an unknown name, and for a file that holds no such prior.
    """
    if is_generated(name):
        return find_generated(name)
    return autoencoder(Path(name)) if name.endswith(FILE_ENDING) else DECODERS[name]


def get_distance(name: str) -> Distance:
    """Return the distance with this name in `DISTANCES`. Raises ValueError for an unknown name."""
    return _look_up("distance", name, DISTANCES)


def get_optimiser(name: str, learning_rate: float = 0.0) -> Optimiser:
    """Return a new optimiser of the kind with this name in `OPTIMISERS`. Raises ValueError for an unknown name.

    learning_rate: 0 for the optimiser's default.
    """
    build, default_rate = _look_up("optimiser", name, OPTIMISERS)
    return build(learning_rate or default_rate)


def _look_up(kind: str, name: str, parts: Mapping[str, NamedPart]) -> NamedPart:
    if name not in parts:
        raise ValueError(f"unknown {kind} {name!r}. Known: {', '.join(parts)}")
    return parts[name]


def get_denoiser_term(name: str, weight: float, noise: float) -> DenoiserTerm | None:
    """Return the term of the denoiser with this name (`find_denoiser`); None for "none" and for a weight of 0.

    weight, noise: as in `DenoiserTerm`. Raises ValueError if one of them is negative, and for an unknown name.
    """
    if weight < 0 or noise < 0:
        raise ValueError(f"denoiser_weight and denoiser_noise must not be negative, got {weight} and {noise}")
    denoise = find_denoiser(name)
    return None if denoise is None or not weight else DenoiserTerm(denoise=denoise, weight=weight, noise=noise)


def check_local_steps(name: str) -> LocalSteps:
    """Return `name` if it is "one_batch", "simulated" or "auto", treatments of local steps. Raises ValueError for another."""
    return _look_up("local_steps", name, {known: known for known in get_args(LocalSteps)})
