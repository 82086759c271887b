"""Tests of presets (named settings of attacks, `tuned` by family of networks): all are valid, and every network has a family."""

from typing import get_args

import pytest
import torch
from observations import observe_steps
from torch import nn

from attacker.attacks import ATTACKS, AttackSpec, Case, cpl, inverting_gradients, presets
from attacker.attacks.matching.priors import VariationTerm
from attacker.attacks.matching.smooth_images import build_smooth_spread
from attacker.attacks.optimisers.first_order import Adam
from attacker.attacks.papers.agic import agic
from attacker.scoring.assignment import assign_reconstructions
from attacker.scoring.metrics import mse
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

IMAGES = DataSpec(shape=(3, 32, 32), num_classes=10)
ROWS = DataSpec(shape=(9,), num_classes=2)
RECOVERED_ERROR = 0.009
"""Largest mean squared error of an example that counts as recovered."""


@pytest.mark.parametrize("attack", list(ATTACKS))
@pytest.mark.parametrize("family", get_args(presets.NetworkFamily))
def test_every_preset_builds_an_attack(attack: str, family: presets.NetworkFamily) -> None:
    settings = presets.get_settings(attack)
    assert set(settings) == set(presets.PRESETS)
    assert set(settings["tuned"]) <= set(get_args(presets.NetworkFamily))
    for arguments in (settings["published"], settings["tuned"].get(family, {})):
        AttackSpec(name=attack, arguments=dict(arguments)).build()


@pytest.mark.parametrize("attack", ["dlg", "idlg", "cpl", "inverting_gradients", "agic", "exact"])
def test_every_network_family_has_tuned_settings(attack: str) -> None:
    assert set(presets.get_settings(attack)["tuned"]) == set(get_args(presets.NetworkFamily))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("lenet_cpl", "sigmoid"),
        ("lenet_dlg", "sigmoid"),
        ("lenet_rog", "relu"),
        ("cnn6", "relu"),
        ("vgg7", "relu"),
        ("resnet18_rog", "residual"),
        ("resnet18", "batch_norm"),
        ("mlp", "dense"),
    ],
)
def test_networks_have_the_right_family(name: str, family: presets.NetworkFamily) -> None:
    assert presets.find_family(models.build_layout(ModelSpec(name=name), IMAGES)) == family


def test_custom_networks_have_a_family() -> None:
    assert presets.find_family(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2))) == "sigmoid"
    assert presets.find_family(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))) == "relu"
    assert presets.find_family(nn.Linear(3, 2)) == "dense"


def test_tuned_preset_has_no_total_variation_for_table_rows() -> None:
    assert presets.get_arguments("inverting_gradients", "tuned", ModelSpec(name="mlp"), ROWS)["tv"] == 0.0
    assert presets.get_arguments("inverting_gradients", "tuned", ModelSpec(name="mlp"), IMAGES)["tv"] > 0.0


def test_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'best' of cpl\. Known: published, tuned"):
        presets.get_arguments("cpl", "best", ModelSpec(name="mlp"), IMAGES)


def test_published_settings_of_inverting_gradients() -> None:
    published = inverting_gradients(**presets.get_settings("inverting_gradients")["published"])
    assert isinstance(published.search.optimiser, Adam)
    assert published.search.optimiser.signed
    assert published.search.steps == 4800
    assert published.polish is None
    assert isinstance(inverting_gradients().search.optimiser, Adam)
    assert not inverting_gradients().search.optimiser.signed


def test_published_settings_of_agic() -> None:
    published, default = (agic(**arguments).matching for arguments in (presets.get_settings("agic")["published"], {}))
    for search, signed in ((published, True), (default, False)):
        assert isinstance(search.search.optimiser, Adam)
        assert search.search.optimiser.signed is signed
        assert (search.polish is None) is signed
        assert (search.prior.variation == VariationTerm()) is signed
        assert (search.objective.batch_norm == 0) is signed


def test_examples_of_one_label_are_recovered_in_smooth_latents() -> None:
    """The last layer's gradient shows little more than the mean of examples of one label; the tuned search separates them."""
    data = DataSpec(shape=(3, 12, 12), num_classes=10)
    x = (0.5 + build_smooth_spread(data)(torch.randn(4, *data.shape, generator=torch.Generator().manual_seed(3)))).clamp(0, 1)
    model, labels = ModelSpec(name="lenet_cpl"), torch.tensor([2, 2, 2, 7])
    case = Case((observe_steps((x, labels), model=model, data=data),))
    tuned = presets.get_arguments("cpl", "tuned", model, data) | {"steps": 3}
    errors = {}
    for name, changes in (("smooth", {}), ("pixels", {"decoder": "pixels", "relative": False})):
        (found,) = cpl(**{**tuned, **changes})([case], rng=torch.Generator().manual_seed(0))
        order = [i for i in assign_reconstructions(found.x, x) if i is not None]
        errors[name] = mse(found.x[order], x)
    assert errors["smooth"].max() < RECOVERED_ERROR / 3
    assert errors["pixels"].max() > RECOVERED_ERROR
    assert errors["smooth"].mean() < 0.3 * errors["pixels"].mean()
