"""Tests that attacks keep tensors on the requested device, which `second_device` emulates without a GPU."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generators import seeded
from observations import observe_steps
from torch import Tensor

from attacker.attacks import AttackSpec, Case
from attacker.attacks.closed_form import layer_input
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

sys.path.append(str(Path(__file__).parents[1]))

from second_device import second_device

DATA = DataSpec(shape=(1, 8, 8), num_classes=4)
Arguments = Mapping[str, Any]


def observe_rounds(network: str, *, batch: int = 1, defense: str = "", rounds: int = 1, **arguments: Any) -> Case:
    """Return the observations of one client's rounds, on random examples."""
    x, y = torch.rand(batch, *DATA.shape, generator=seeded(3)), torch.arange(batch) % DATA.num_classes
    model = ModelSpec(name=network, arguments=arguments)
    seen = observe_steps((x, y), model=model, data=DATA, seed=1, defense=defense, learning_rate=0.5, client="ada")
    return Case(tuple(replace(seen, cohort=(), round=number) for number in range(1, rounds + 1)))


def test_second_device_refuses_mixed_devices_like_cuda() -> None:
    """If the emulated device allowed mixed devices, the tests below could not fail."""
    with second_device() as device:
        there, here = torch.ones(3, 2).to(device), torch.ones(3, 2)
        assert (there + there).device.type == there.device.type != here.device.type
        assert (there + torch.tensor(1.0)).cpu().tolist() == [[2.0, 2.0]] * 3
        assert there[torch.tensor([0, 2])].shape == (2, 2)
        assert torch.arange(3.0).to(device)[[2, 0]].tolist() == [2.0, 0.0]
        assert torch.func.vmap(torch.func.grad(lambda x: x.square().sum()))(there).cpu().tolist() == [[2.0, 2.0]] * 3
        for wrong in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: here[torch.tensor([0], device=device)],
            lambda: torch.func.vmap(lambda x: x + here[0])(there),
            lambda: torch.rand(2, device=device, generator=torch.Generator()),
        ):
            with pytest.raises(RuntimeError):
                wrong()
        with pytest.raises(TypeError):
            there.numpy()


class Residual(torch.nn.Module):
    """A residual network with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.stem, self.norm, self.inner = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        return self.head((x + self.inner(x)).mean(dim=(2, 3)))


class Attending(torch.nn.Module):
    """A network with attention and layer norm, whose gradients `torch.func` or plain PyTorch computes."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.embed, self.norm, self.head = nn.Conv2d(1, 8, 4, stride=4), nn.LayerNorm(8), nn.Linear(8, 4)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).mT
        fed = self.norm(tokens)
        return self.head((tokens + self.attend(fed, fed, fed, need_weights=False)[0]).mean(dim=1))


@pytest.mark.parametrize(
    ("name", "arguments", "case"),
    [
        ("inverting_gradients", {"steps": 2}, {"network": "lenet_dlg"}),
        ("inverting_gradients", {"steps": 2}, {"network": "mlp", "batch": 3, "defense": "clip(1) | gaussian(0.01)"}),
        ("inverting_gradients", {"steps": 2}, {"network": "mlp", "batch": 3, "defense": "top_k(0.5)"}),
        ("inverting_gradients", {"steps": 2}, {"network": "mlp", "batch": 2, "defense": "qsgd(4)"}),
        ("inverting_gradients", {"steps": 30, "give_up": 1.0}, {"network": "mlp", "batch": 2}),
        ("inverting_gradients", {"steps": 2}, {"network": f"{__name__}:Residual", "batch": 2}),
        ("inverting_gradients", {"steps": 2}, {"network": f"{__name__}:Attending", "batch": 2}),
        (
            "inverting_gradients",
            {"steps": 2, "restarts": 2, "consistency": 0.1, "registered": True},
            {"network": "mlp", "batch": 2},
        ),
        ("inverting_gradients", {"steps": 2, "feature_matching": 0.1}, {"network": "mlp", "batch": 2}),
        ("inverting_gradients", {"steps": 2, "signed": True, "decoder": "deep_prior"}, {"network": "mlp"}),
        ("inverting_gradients", {"steps": 2, "closed_form_start": True}, {"network": "mlp", "batch": 2}),
        ("cpl", {"steps": 1, "optimiser": "wolfe", "tv": 1e-4}, {"network": "lenet_dlg"}),
        ("cpl", {"steps": 1, "optimiser": "wolfe", "tv": 1e-4}, {"network": "lenet_dlg", "batch": 3}),
        ("cpl", {"steps": 1, "decoder": "smooth", "init": "smooth", "relative": True}, {"network": "mlp", "batch": 3}),
        ("cpl", {"steps": 1, "local_steps": "simulated"}, {"network": "mlp", "batch": 3}),
        ("rog", {"steps": 2}, {"network": "lenet_dlg"}),
        ("dlg", {"steps": 1}, {"network": "mlp", "batch": 3}),
        ("exact", {}, {"network": "mlp"}),
        ("exact", {"steps": 1}, {"network": "mlp", "batch": 3}),
        ("exact", {"route": "features", "fallback": "none"}, {"network": "lenet_dlg", "batch": 3}),
        ("exact", {"fallback": "none"}, {"network": "mlp", "defense": "clip(0.5)"}),
        ("rgap", {}, {"network": "mlp"}),
        ("agic", {"steps": 2, "pre_steps": 2}, {"network": "mlp", "rounds": 2}),
        ("agic", {"steps": 2, "pre_steps": 2}, {"network": "mlp", "rounds": 2, "batch": 3}),
        ("accumulate", {"steps": 2}, {"network": "mlp", "rounds": 2, "batch": 2}),
        ("cocktail_party", {}, {"network": "mlp", "batch": 4}),
        ("feature_reconstruction", {"steps": 2}, {"network": "lenet_dlg", "batch": 2}),
        ("spans", {"relu": False}, {"network": "mlp", "rounds": 2}),
    ],
)
def test_an_attack_keeps_its_tensors_on_its_device(name: str, arguments: Arguments, case: Arguments) -> None:
    if ":" in case["network"]:
        models.admit(case["network"])
    given, spec = [observe_rounds(**case)], AttackSpec(name=name, arguments=arguments)
    try:
        (here,) = spec.build()(given, rng=torch.Generator().manual_seed(0))
    except ValueError as error:
        pytest.fail(f"this attack refuses this case, so that nothing is tested: {error}")
    with second_device() as device:
        (there,) = spec.build(device=device)(given, rng=torch.Generator().manual_seed(0))
        assert {there.x.device.type, there.y.device.type, there.confidence.device.type, there.loss.device.type} == {"cpu"}
    assert there.route == here.route
    assert there.x.shape == here.x.shape
    assert (there.x - here.x).abs().median() < 0.05


class Pooled(torch.nn.Sequential):
    """A network with ReLU, max pooling and a hidden linear layer, whose input the route `layer_input` inverts."""

    def __init__(self) -> None:
        nn = torch.nn
        layers = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 16))
        super().__init__(*layers, nn.ReLU(), nn.Linear(16, 4))


def test_layer_input_is_inverted_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_input, "STAGE_STEPS", (2, 2))
    network = f"{__name__}:Pooled"
    models.admit(network)
    spec = AttackSpec(name="exact", arguments={"fallback": "none"})
    (here,) = spec.build()([observe_rounds(network=network)], rng=torch.Generator().manual_seed(0))
    with second_device() as device:
        (there,) = spec.build(device=device)([observe_rounds(network=network)], rng=torch.Generator().manual_seed(0))
    assert (there.route, here.route) == ("layer_input", "layer_input")
    assert (there.x - here.x).abs().max() < 0.05
