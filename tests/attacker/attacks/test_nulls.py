"""Tests that the result of every registered attack's null does not depend on what a client sent."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observations import observe_rounds, observe_steps
from torch import Tensor

from attacker.attacks import ATTACKS, AttackSpec, Case, Need
from attacker.reconstruction import Reconstruction
from fedsim.recording import DataSpec, ModelSpec, Observation
from fedsim.recording.codec import Payload, encode

LENET = ModelSpec(name="lenet_dlg")
DATA = DataSpec(shape=(1, 8, 8), num_classes=4)
PASSES = ((0, 3), (1, 2), (3, 1), (2, 0))
"""Labels of four rounds, two passes over the same four examples."""
VARIANTS: dict[str, dict[str, Any]] = {
    "accumulate after closed forms": {"name": "accumulate", "closed_forms": True},
    "agic after closed forms": {"name": "agic", "closed_forms": True},
    "accumulate, refined": {"name": "accumulate", "refined": True},
    "accumulate by features": {"name": "accumulate", "compare": "features"},
    "accumulate by inverting_gradients": {"name": "accumulate", "search": "inverting_gradients"},
    "agic by images": {"name": "agic", "compare": "images", "pre_steps": 2},
    "agic by simulation": {"name": "agic", "local_steps": "simulated"},
    "agic of channels": {"name": "agic", "colour": False, "continuation": 1.0},
    "agic with a polish": {"name": "agic", "steps": 60},
    "agic as published": {"name": "agic", "compare": "published", "pre_steps": 2},
    "agic without links": {"name": "agic", "compare": "none"},
    "agic by squared distances": {"name": "agic", "distance": "euclidean", "optimiser": "lbfgs"},
    "cocktail_party without zeros of ReLU": {"name": "cocktail_party", "refine": False},
    "cohort_spans of repeated updates": {"name": "cohort_spans", "repeated": True},
    "cohort_spans without components": {"name": "cohort_spans", "components": False},
    "cohort_spans without lone rows": {"name": "cohort_spans", "lone_rows": False},
    "cpl from a closed form": {"name": "cpl", "closed_form_start": True, "tv": 1e-3},
    "cpl from features": {"name": "cpl", "features": True},
    "cpl with a box and simulated steps": {"name": "cpl", "boxed": True, "local_steps": "simulated", "optimiser": "wolfe"},
    "cpl of smooth images": {"name": "cpl", "relative": True, "decoder": "smooth", "init": "smooth", "optimiser": "wolfe"},
    "cpl with restarts": {"name": "cpl", "restarts": 3},
    "cpl with total variation": {"name": "cpl", "tv": 3e-5},
    "dlg from a closed form": {"name": "dlg", "closed_form_start": True},
    "exact and agic": {"name": "exact", "fallback": "agic"},
    "exact and dlg": {"name": "exact", "fallback": "dlg"},
    "exact and inverting_gradients": {"name": "exact", "fallback": "inverting_gradients"},
    "exact and nothing": {"name": "exact", "fallback": "none"},
    "exact by search": {"name": "exact", "route": "optimisation"},
    "feature_reconstruction in pixels": {"name": "feature_reconstruction", "matched": "head", "decoder": "pixels"},
    "feature_reconstruction with features in the network": {
        "name": "feature_reconstruction",
        "matched": "head",
        "decoder": "shared_prior",
        "injected": True,
    },
    "hgap by its gradient": {"name": "hgap", "criterion": "gradient"},
    "inverting_gradients from a closed form": {"name": "inverting_gradients", "closed_form_start": True},
    "inverting_gradients with a constant weight of channels": {
        "name": "inverting_gradients",
        "colour": False,
        "continuation": 1.0,
    },
    "inverting_gradients with a polish": {"name": "inverting_gradients", "steps": 60},
    "inverting_gradients of one batch": {"name": "inverting_gradients", "local_steps": "one_batch"},
    "inverting_gradients with draws": {"name": "inverting_gradients", "draws": True},
    "inverting_gradients of three starts": {"name": "inverting_gradients", "restarts": 3, "consistency": 0.1, "registered": True},
    "rog in pixels": {"name": "rog", "decoder": "pixels", "init": "uniform", "tv": 1e-3, "distance": "cosine"},
    "rog with the usual decay rates": {"name": "rog", "beta1": 0.9, "beta2": 0.999},
    "rog without colours": {"name": "rog", "colour": False},
    "rog from coarse to fine": {"name": "rog", "decoder": "coarse_to_fine"},
    "rog with draws": {"name": "rog", "draws": True},
    "rog enhanced": {"name": "rog", "enhancer": "small"},
    "rog by simulation": {"name": "rog", "local_steps": "simulated", "boxed": True},
    "rog with surrogate weights": {"name": "rog", "surrogate": True},
    "spans without components": {"name": "spans", "components": False},
    "spans without names": {"name": "spans", "anonymous": True},
    "spans without zeros of ReLU": {"name": "spans", "relu": False},
    "without knowing the defense": {"name": "cpl", "knows_defense": False},
}
CANDIDATES = Path(__file__).parent / "membership" / "candidates.npz"
NEEDED: dict[str, dict[str, Any]] = {
    "learning_to_invert": {"images": str(CANDIDATES)},
    "membership": {"candidates": str(CANDIDATES)},
}
SPECS = {name: AttackSpec(name=name, arguments=NEEDED.get(name, {}), null=True) for name in ATTACKS} | {
    title: AttackSpec(name=variant["name"], arguments={k: v for k, v in variant.items() if k != "name"}, null=True)
    for title, variant in VARIANTS.items()
}
SAME_START = {
    "relu_modifier",
    "signed",
    "weighted",
    "surrogate",
    "compiled",
    "knows_defense",
    "boxed",
    "denoised",
    "paper_mode",
    "residual",
}
"""Switches of how gradients are compared, not of where a search starts; VARIANTS must set every other one."""
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda u: torch.randn(u.shape, generator=torch.Generator().manual_seed(1)),
    "no number": lambda u: torch.full_like(u, float("nan")),
}
MEASURED = {"seconds"}


def make_rounds(examples: int, defense: str = "") -> list[Observation]:
    """Return a client's rounds with a number of examples each, and weights that change between rounds."""
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    rounds = [[(x[list(labels[:examples])], torch.tensor(labels[:examples]))] for labels in PASSES]
    return observe_rounds(rounds, model=LENET, data=DATA, learning_rate=0.01, defense=defense).observations


def null_of(spec: AttackSpec, observations: list[Observation]) -> list[Reconstruction]:
    """Return the results of a null with few steps."""
    few = {key: 3 for key in ("steps", "pre_steps") if key in signature(ATTACKS[spec.name]).parameters}
    attack = replace(spec, arguments={**few, **spec.arguments}).build()
    whole = bool({Need.SAME_CLIENT, Need.UNNAMED} & attack.needs)
    cases = [Case(tuple(observations))] if whole else [Case((one,)) for one in observations]
    return attack(cases, rng=torch.Generator().manual_seed(3))


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def sent(observation: Observation, change: Callable[[Tensor], Tensor]) -> Observation:
    """Return an observation with another update, buffers and metrics."""
    update = {name: change(u) for name, u in observation.update.items()}
    loss = float(next(iter(update.values())).sum())
    return replace(observation, payload=encode(update), buffers_after=update, metrics={"loss": loss})


def examples_of(spec: AttackSpec) -> int:
    return 1 if spec.name in ("idlg", "rgap", "hgap") else 2


@pytest.mark.parametrize("title", SPECS)
def test_null_is_bitwise_equal_for_any_update(title: str) -> None:
    check_that_nothing_changes(title, make_rounds(examples_of(SPECS[title])))


@pytest.mark.parametrize("defense", ["top_k(0.1)", "gaussian(snr_db=20)", "top_k(0.1) | gaussian(0.002)", "sign('mean')"])
@pytest.mark.parametrize("title", ["agic", "cpl", "cpl with total variation", "exact", "dlg"])
def test_null_is_bitwise_equal_for_any_defended_update(title: str, defense: str) -> None:
    check_that_nothing_changes(title, make_rounds(2, defense))


def check_that_nothing_changes(title: str, observations: list[Observation]) -> None:
    spec = SPECS[title]
    expected = null_of(spec, observations)
    for words, change in CHANGES.items():
        found = null_of(spec, [sent(one, change) for one in observations])
        for one, other in zip(expected, found, strict=True):
            names = [f.name for f in fields(one) if f.name not in MEASURED]
            changed = [name for name in names if not same(getattr(one, name), getattr(other, name))]
            assert not changed, f"{title}: {', '.join(changed)} changed with an update of {words}"


@pytest.mark.parametrize("title", SPECS)
def test_null_answers_although_the_payload_cannot_be_decoded(title: str) -> None:
    spec = SPECS[title]
    unreadable = Payload(tensors={}, codec="none that there is")
    answers = null_of(spec, [replace(one, payload=unreadable) for one in make_rounds(examples_of(spec))])
    assert answers
    for found in answers:
        assert found.route == "prior alone"
        assert found.explained.max() == 0
        assert found.confidence.max() < 0.05


def test_every_attack_and_every_other_switch_is_tested() -> None:
    assert {spec.name for spec in SPECS.values()} == set(ATTACKS)
    for name in ATTACKS:
        known = signature(ATTACKS[name]).parameters
        switches = {argument for argument in known if isinstance(known[argument].default, bool)}
        for argument in (switches - SAME_START) | ({"fallback", "compare"} & set(known)):
            assert any(spec.name == name and argument in spec.arguments for spec in SPECS.values()), f"{name}: {argument}"


def test_null_does_not_use_oracles() -> None:
    (first, *_), attack = make_rounds(2), AttackSpec(name="cpl", arguments={"steps": 2, "agreement": 1.0}, null=True).build()
    with_oracles = Case((first,), known_labels=torch.tensor([0, 3]), known_logits=torch.ones(2, 4))
    both = [attack([case], rng=torch.Generator().manual_seed(0))[0] for case in (Case((first,)), with_oracles)]
    assert torch.equal(both[0].x, both[1].x)
    assert both[1].oracles == ()


def test_insider_images_of_a_null_do_not_depend_on_the_update(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", images=np.arange(4 * 64, dtype=np.uint8).reshape(4, 8, 8), labels=np.arange(4))
    spec = AttackSpec(name="cpl", arguments={"init": "insider", "auxiliary": str(tmp_path / "own.npz")}, null=True)
    observations = make_rounds(2)
    for one, other in zip(null_of(spec, observations), null_of(spec, [sent(o, torch.neg) for o in observations]), strict=True):
        assert torch.equal(one.x, other.x)


def links_of(found: Reconstruction) -> list[tuple[int, int]]:
    return [(slot.round, slot.example) for slot in found.slots]


def test_null_links_rounds_by_numbers_of_examples_only() -> None:
    def client(sizes: list[int], **training: object) -> Case:
        seen = []
        for number, size in enumerate(sizes, start=1):
            batch = torch.rand(size, 1, 8, 8), torch.arange(size)
            one = observe_steps(batch, model=ModelSpec(name="lenet_dlg"), data=DATA)
            seen.append(replace(one, round=number, training=replace(one.training, batch_size=2, **training)))
        return Case(tuple(seen))

    null = AttackSpec(name="agic", arguments={"steps": 1}, null=True).build()
    rng = torch.Generator().manual_seed(0)
    (apart,) = null([client([2, 2, 2])], rng=rng)
    assert links_of(apart) == [(1, 0), (1, 1), (2, 2), (2, 3), (3, 4), (3, 5)]
    (short,) = null([client([2, 1, 2, 1])], rng=rng)
    assert links_of(short) == [(1, 0), (1, 1), (2, 2), (3, 0), (3, 1), (4, 2)]
    (epochs,) = null([client([2, 2], steps=None, epochs=1)], rng=rng)
    assert links_of(epochs) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_null_depends_on_the_seed() -> None:
    """If the seed did not matter, the bitwise equality tested above would be trivial."""
    settings: Mapping[str, Any] = {"steps": 2}
    attack = AttackSpec(name="cpl", arguments=settings, null=True).build()
    one, other = (attack([Case((make_rounds(2)[0],))], rng=torch.Generator().manual_seed(seed))[0] for seed in (0, 1))
    assert not torch.equal(one.x, other.x)
