"""Tests of third-party networks: each of the ways in which attacks compute gradients gives those of plain PyTorch."""

import copy
import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # appended, since a script there has the name of a package
import foreign
from support.foreign import networks
from support.single_cases import LocalClient

from attacker.attacks import AttackSpec, Case
from attacker.attacks.base import explain_refusal
from attacker.attacks.gradients.convolutions import to_channels_last
from attacker.attacks.gradients.vectorised import build_per_problem
from attacker.attacks.simulation import gradients
from attacker.attacks.simulation.gradients import build_gradient, squared_norm
from attacker.replay.example_counts import estimate_examples
from fedsim import models
from fedsim.models import ModuleSpec
from fedsim.recording import DataSpec, ModelSpec, Training

SHAPES = networks.SMALL_NETWORKS
PROBLEMS, EXAMPLES = 2, 3


def network(name: str) -> tuple[nn.Module, DataSpec]:
    torch.manual_seed(3)
    shape, classes = SHAPES[name]
    return getattr(networks, name)().eval(), DataSpec(shape=shape, num_classes=classes)


def compute_by_autograd(model: nn.Module, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return a network's gradient as a client computes it, and the derivative of its squared norm by x."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        loss = nn.functional.cross_entropy(model(x), y)
    names = [name for name, _ in model.named_parameters()]
    found = dict(zip(names, torch.autograd.grad(loss, list(model.parameters()), create_graph=True), strict=True))
    (slope,) = torch.autograd.grad(squared_norm(found), x)
    return {name: g.detach() for name, g in found.items()}, slope


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.norm())


class HeadFirst(nn.Module):
    """A network that registers its head before a hidden linear layer, and a layer that it never calls after both."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.hidden, self.unused = nn.Linear(20, 5), nn.Linear(108, 20), nn.Linear(20, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x.flatten(1))))


class ConvolutionalHead(nn.Module):
    """A network whose logits are of a convolution, with linear layers that scale its channels (squeeze and excitation)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.scale, self.head = nn.Conv2d(3, 12, 3), nn.Linear(12, 12), nn.Conv2d(12, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(h * self.scale(h.mean((2, 3))).sigmoid()[:, :, None, None]).mean((2, 3))


def attacked(module: nn.Module) -> Case:
    """Return what a server sees of a client that trains `module` for one step on three images of the classes 4, 0 and 2."""
    torch.manual_seed(0)
    model, data = ModuleSpec.of(module), DataSpec(shape=(3, 6, 6), num_classes=5)
    weights = {name: p.detach() for name, p in models.build(model, data).named_parameters()}
    client = LocalClient(model, data, Training(learning_rate=0.1, batch_size=3, steps=1), weights)
    return client.make_case([(torch.rand(3, *data.shape), torch.tensor([4, 0, 2]))], "client")


def test_labels_are_read_from_the_head_wherever_the_network_registers_it() -> None:
    attack = AttackSpec(name="inverting_gradients", arguments={"steps": 1}).build(device="cpu")
    (found,) = attack([attacked(HeadFirst())], rng=torch.Generator().manual_seed(0))
    assert sorted(found.y.tolist()) == [0, 2, 4]


def test_a_hidden_layer_is_not_taken_for_the_head() -> None:
    case = attacked(ConvolutionalHead())
    attack = AttackSpec(name="inverting_gradients", arguments={}).build(device="cpu")
    assert "cpl --set label_rule=joint` search for labels" in explain_refusal(attack, case)
    assert explain_refusal(AttackSpec(name="cpl", arguments={"label_rule": "joint"}).build(device="cpu"), case) == ""
    unreported = replace(case.observations[0], num_examples=None)
    assert estimate_examples(unreported).examples == 3


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "HardNet"])
def test_gradients_and_their_derivatives_by_vmap_and_in_one_batch_are_those_of_autograd(name: str) -> None:
    """Weights are in the memory format channels last, as in attacks, which breaks `view` in a network if it is not handled."""
    model, data = network(name)
    x = torch.rand(PROBLEMS, EXAMPLES, *data.shape, generator=torch.Generator().manual_seed(1))
    y = torch.randint(data.num_classes, (PROBLEMS, EXAMPLES), generator=torch.Generator().manual_seed(2))
    expected = [compute_by_autograd(model, *problem) for problem in zip(x, y, strict=True)]
    weights = {key: to_channels_last(p.detach()) for key, p in model.named_parameters()}
    buffers = {key: b for key, b in model.named_buffers() if key in models.list_buffers(model)}
    mapped = build_gradient(model, data)

    def length(x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found = mapped(weights, x, y, buffers)
        return squared_norm(found), found

    slope, (_, found) = vmap(grad_and_value(length, has_aux=True))(x, y)
    for p in range(PROBLEMS):
        assert all(error(found[key][p], g) < 1e-4 for key, g in expected[p][0].items())
        assert error(slope[p], expected[p][1]) < 1e-3
    batched = build_per_problem(model, data, "cross_entropy")
    for count in (1, PROBLEMS) if batched else ():
        free = x[:count].clone().requires_grad_()
        both = {k: torch.stack(g) if isinstance(g, tuple) else g for k, g in batched(weights, free, y[:count], buffers).items()}
        (own,) = torch.autograd.grad(squared_norm(both), free)
        for p in range(count):
            assert all(error(both[key][p], g) < 1e-4 for key, g in expected[p][0].items())
            assert error(own[p], expected[p][1]) < 1e-3


def test_plain_convolutional_networks_use_the_fast_computation() -> None:
    model, data = network("QuickstartNet")
    assert build_per_problem(model, data, "cross_entropy") is not None
    assert gradients.explain_vmap_failure(model, data, "cross_entropy") == ""


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_activation_checkpointing_allows_the_fast_computation_and_stays_on_for_clients(reentrant: bool | None) -> None:
    gradients._find_vmap_failure.cache_clear()
    model, data = network("CheckpointedNet")
    expected, _ = compute_by_autograd(model, x := torch.rand(2, *data.shape), y := torch.tensor([1, 4]))
    model.reentrant = reentrant
    assert gradients.explain_vmap_failure(model, data, "cross_entropy") == ""
    assert build_per_problem(model, data, "cross_entropy") is not None
    found = build_gradient(model, data)({name: p.detach() for name, p in model.named_parameters()}, x, y)
    assert all(error(found[name], g) < 1e-5 for name, g in expected.items())
    runs: list[None] = []
    model.last.register_forward_hook(lambda *_: runs.append(None))
    model(x).sum().backward()
    assert len(runs) == 2, "the client itself recomputes"


def test_derivatives_of_hard_sigmoids_agree_with_finite_differences() -> None:
    """PyTorch has no second derivative of its hard sigmoid, and its factor 1/6 is rounded to float32."""
    model, data = network("HardNet")
    model.double()
    gradient, y = build_gradient(model, data), torch.tensor([1, 4])
    weights = {key: p.detach() for key, p in model.named_parameters()}
    x = torch.rand(2, *data.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: squared_norm(gradient(weights, x, y)), x, fast_mode=True)
    plain = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    assert all(error(g, e) < 1e-7 for g, e in zip(gradient(weights, x, y).values(), plain, strict=True))


def test_a_network_that_torch_func_cannot_run_is_reported_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    gradients._find_vmap_failure.cache_clear()
    model, data = network("OwnCodeNet")
    with caplog.at_level(logging.WARNING, logger=gradients.__name__):
        reason = gradients.explain_vmap_failure(model, data, "cross_entropy")
        assert "in-place operation" in reason
        assert gradients.explain_vmap_failure(copy.deepcopy(model), data, "cross_entropy") == reason
    messages = [record.message for record in caplog.records]
    assert messages == [f"OwnCodeNet is attacked by plain PyTorch, one case after the other: {reason}"]


def test_a_fast_computation_with_wrong_gradients_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast gradients are compared with those of plain PyTorch; it is not sufficient that they raise no error."""
    gradients._find_vmap_failure.cache_clear()
    model, data = network("RowMLP")
    own = gradients._build_by_torch_func

    def wrong(*given: object) -> object:
        right = own(*given)
        return lambda *guess: {name: 1.05 * g for name, g in right(*guess).items()}

    monkeypatch.setattr(gradients, "_build_by_torch_func", wrong)
    assert "differ from those of plain PyTorch" in gradients.explain_vmap_failure(model, data, "cross_entropy")
    gradients._find_vmap_failure.cache_clear()


def test_a_network_with_several_inputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    models.admit("support.foreign.networks:TwoInputNet")
    with pytest.raises(ValueError, match=r"takes 2 inputs \(image, row\).*one tensor"):
        models.build_layout(ModelSpec(name="support.foreign.networks:TwoInputNet"), DataSpec(shape=(3, 8, 8), num_classes=10))


def test_trying_the_fast_computation_raises_no_warning() -> None:
    gradients._find_vmap_failure.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients.explain_vmap_failure(*network("RowLSTM"), "cross_entropy")


@pytest.mark.parametrize("name", ["QuickstartNet", "AttentionNet", "OwnCodeNet", "RowLSTM"])
def test_a_network_goes_from_two_state_dicts_to_a_report_with_three_attacks(name: str, tmp_path: Path) -> None:
    """The commands are those of users; benchmarks/foreign.py does the same with the other networks."""
    model, data = network(name)
    attacks = foreign.IMAGE_ATTACKS if data.is_image else foreign.TABULAR_ATTACKS
    assert foreign.attack_imported(name, model, data, attacks, tmp_path, "cpu") == (3, "")
