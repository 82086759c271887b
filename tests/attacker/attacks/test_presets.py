"""Presets are data: each is valid, belongs to a family that every network has, and is written out as arguments."""

import pytest
from torch import nn

from attacker.attacks import ATTACKS, AttackSpec, inverting_gradients, presets
from attacker.attacks.optimisers.first_order import Adam
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

IMAGES = DataSpec(shape=(3, 32, 32), num_classes=10)
ROWS = DataSpec(shape=(9,), num_classes=2)


@pytest.mark.parametrize("attack", list(ATTACKS))
@pytest.mark.parametrize("family", presets.FAMILIES)
def test_every_preset_is_an_attack(attack: str, family: presets.Family) -> None:
    settings = presets.settings_of(attack)
    assert set(settings) == set(presets.PRESETS)
    assert set(settings["tuned"]) <= set(presets.FAMILIES)
    for arguments in (settings["published"], settings["tuned"].get(family, {})):
        AttackSpec(name=attack, arguments=dict(arguments)).build()


@pytest.mark.parametrize("attack", ["dlg", "idlg", "cpl", "inverting_gradients", "agic", "exact"])
def test_every_family_has_settings_of_its_own(attack: str) -> None:
    assert set(presets.settings_of(attack)["tuned"]) == set(presets.FAMILIES)


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
def test_networks_have_the_family_that_people_would_name(name: str, family: presets.Family) -> None:
    assert presets.family_of(models.layout(ModelSpec(name=name), IMAGES)) == family


def test_a_network_by_somebody_else_has_a_family() -> None:
    assert presets.family_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2))) == "sigmoid"
    assert presets.family_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))) == "relu"
    assert presets.family_of(nn.Linear(3, 2)) == "dense"


def test_rows_have_no_neighbours() -> None:
    assert presets.arguments_of("inverting_gradients", "tuned", ModelSpec(name="mlp"), ROWS)["tv"] == 0.0
    assert presets.arguments_of("inverting_gradients", "tuned", ModelSpec(name="mlp"), IMAGES)["tv"] > 0.0


def test_an_unknown_preset_names_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown preset 'best' of cpl\. Known: published, tuned"):
        presets.arguments_of("cpl", "best", ModelSpec(name="mlp"), IMAGES)


def test_the_published_settings_of_inverting_gradients_stay_to_be_had() -> None:
    published = inverting_gradients(**presets.settings_of("inverting_gradients")["published"])
    assert isinstance(published.search.optimiser, Adam)
    assert published.search.optimiser.signed
    assert published.search.steps == 4800
    assert isinstance(inverting_gradients().search.optimiser, Adam)
    assert not inverting_gradients().search.optimiser.signed
