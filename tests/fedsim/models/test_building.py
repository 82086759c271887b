"""Tests of building models that a manifest names: only admitted code is imported, and sizes are limited."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedsim.models import MAX_PARAMETERS, admit, build, build_layout, find_head, list_buffers
from fedsim.models.building import _ADMITTED
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(1, 6, 6), num_classes=4)
TWO = DataSpec(shape=(1, 6, 6), num_classes=2)

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(36, 4)

    def forward(self, x):
        return self.fc(x.flatten(1))

class Stubborn(Net):
    "Looks at its values while it is built."
    def __init__(self):
        super().__init__()
        self.gain = float(self.fc.weight.detach().norm())

def sized(shape, num_classes, width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], width), nn.Linear(width, num_classes))

def other_words(inputs, classes):
    return sized(inputs, classes)

def only_classes(num_classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, num_classes))

def normed(shape, num_classes):
    layers = nn.Sequential(nn.BatchNorm2d(shape[0]), nn.Flatten(), nn.Linear(36, num_classes))
    layers.register_buffer("scratch", torch.ones(3), persistent=False)
    return layers

def list_of_logits(shape, num_classes):
    class Many(nn.Module):
        def forward(self, x):
            return [x]
    return Many()

def pixelwise(shape, num_classes):
    return nn.Conv2d(shape[0], num_classes, 1)

def number(shape, num_classes):
    return 3

class Casts(nn.Sequential):
    def forward(self, x):
        return super().forward(x.to(torch.bfloat16))

def half_convolution():
    return Casts(nn.Conv2d(1, 4, 6), nn.Flatten()).to(torch.bfloat16)

three = 3
"""


@pytest.fixture
def their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a third party's module in the current folder."""
    (tmp_path / "somebodys_nets.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = dict(_ADMITTED)
    yield "somebodys_nets"
    _ADMITTED.clear()
    _ADMITTED.update(before)
    sys.modules.pop("somebodys_nets", None)


def spec(name: str, **arguments: object) -> ModelSpec:
    return ModelSpec(name=name, arguments=arguments)


def test_code_named_by_a_manifest_is_not_imported_unless_it_is_admitted(their_code: str) -> None:
    with pytest.raises(ValueError, match=r"not part of fedleak, .* only with your permission: .* --model somebodys_nets:Net"):
        build(spec(f"{their_code}:Net"), DATA)
    assert their_code not in sys.modules


@pytest.mark.parametrize("function", ["Net", "Stubborn", "sized", "other_words", "only_classes"])
def test_admitted_code_is_built_by_its_reference_and_by_a_given_name(their_code: str, function: str) -> None:
    admit(f"{their_code}:{function}", "theirs")
    for name in (f"{their_code}:{function}", "theirs"):
        model = build(spec(name), DATA, seed=3)
        assert model(torch.rand(2, 1, 6, 6)).shape == (2, 4)
        again, other = build(spec(name), DATA, seed=3), build(spec(name), DATA, seed=4)
        key = find_head(model)[0]
        assert torch.equal(model.state_dict()[key], again.state_dict()[key])
        assert not torch.equal(model.state_dict()[key], other.state_dict()[key])


def test_arguments_reach_admitted_code(their_code: str) -> None:
    admit(f"{their_code}:sized")
    assert build_layout(spec(f"{their_code}:sized", width=5), DATA)[1].out_features == 5
    with pytest.raises(ValueError, match="widht"):
        build(spec(f"{their_code}:sized", widht=5), DATA)
    with pytest.raises(ValueError, match=r"has \d\d,\d\d\d,\d\d\d,\d\d\d values"):
        build(spec(f"{their_code}:sized", width=10**9), DATA)


@pytest.mark.parametrize(
    ("function", "data", "words"),
    [
        ("Net", DataSpec(shape=(1, 6, 6), num_classes=7), "returns 4, but 7 classes need 7 logits per example"),
        ("Net", DataSpec(shape=(1, 8, 8), num_classes=4), r"does not fit inputs of shape \(1, 8, 8\)"),
        ("Stubborn", DataSpec(shape=(1, 8, 8), num_classes=4), r"does not fit inputs of shape \(1, 8, 8\)"),
        ("half_convolution", DATA, r"does not fit .*; attacks compute in float32: .* as in x\.to\(self\.layer\.weight"),
        ("list_of_logits", DATA, r"returns list, .*; name a function whose network .* returns one tensor of logits, \(N, K\)"),
        ("pixelwise", DATA, r"returns \(2, 4, 6, 6\) for 2 examples, .*the mean over all positions if it labels each pixel"),
        ("number", DATA, r"must return a torch\.nn\.Module, got int"),
    ],
)
def test_admitted_code_that_does_not_fit_the_data_is_refused(their_code: str, function: str, data: DataSpec, words: str) -> None:
    admit(f"{their_code}:{function}")
    with pytest.raises(ValueError, match=words):
        build(spec(f"{their_code}:{function}"), data)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("somebodys_nets", "'somebodys_nets' is not a reference to Python code; write module:function"),
        (":Net", "module:function"),
        ("no_such_module_anywhere:Net", "ModuleNotFoundError.*no_such_module_anywhere"),
        ("somebodys_nets:Nett", "somebodys_nets:Nett.*AttributeError.*'Nett'"),
        ("somebodys_nets:three", "not a function or class, but of type int"),
    ],
)
def test_a_reference_that_cannot_be_imported_is_named(their_code: str, reference: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        admit(reference)


def test_a_built_in_model_cannot_be_replaced(their_code: str) -> None:
    with pytest.raises(ValueError, match="'mlp' is built in"):
        admit(f"{their_code}:Net", "mlp")


def test_buffers_are_those_that_a_state_dict_contains(their_code: str) -> None:
    admit(f"{their_code}:normed")
    model = build(spec(f"{their_code}:normed"), DATA)
    assert list_buffers(model) == ("0.running_mean", "0.running_var", "0.num_batches_tracked")
    assert list_buffers(build(spec("mlp"), DATA)) == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hidden": [10**12]}, r"has 41,000,000,000,004 values in parameters and buffers, and the limit is 2,147,483,648"),
        ({"hidden": [10**5, 10**5]}, r"has 10,00\d,\d\d\d,\d\d\d values"),
        ({"hidden": [10**12, 10**12]}, "does not fit"),
        ({"hidden": [10**30]}, "does not fit"),
    ],
)
def test_a_model_that_is_too_large_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        build(spec("mlp", **arguments), DATA)
    assert len(str(error.value)) < 500


def test_the_limit_counts_every_value() -> None:
    width = (MAX_PARAMETERS - 4) // 41
    assert build_layout(spec("mlp", hidden=[width]), DATA)[1].out_features == width
    with pytest.raises(ValueError, match="the limit is"):
        build_layout(spec("mlp", hidden=[width + 1]), DATA)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *[("mlp", {"hidden": value}) for value in ("ab", 3, None, [2.5], ["3"], [0], [-1], [True], {"a": 1})],
        ("resnet18", {"batch_norm": "no"}),
        ("resnet18", {"batch_norm": None}),
        ("torchvision", {"architecture": ["resnet18"]}),
        ("torchvision", {"architecture": 3}),
        ("torchvision", {}),
        ("lenet_dlg", {"strides": [1]}),
        *[("mlp", {"outputs": value}) for value in (0, 3, "4", [4], True, None)],
        ("mlp", {"shape": [1]}),
    ],
)
def test_arguments_of_a_wrong_kind_are_a_value_error(name: str, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=name):
        build(spec(name, **arguments), DATA)


@pytest.mark.parametrize("name", ["mlp", "lenet_dlg", "resnet20_4", "cnn6", "fcn3"])
def test_two_classes_may_have_a_single_logit(name: str) -> None:
    assert build(spec(name, outputs=1), TWO).eval()(torch.rand(3, 1, 6, 6)).shape == (3, 1)
    with pytest.raises(ValueError, match=r"outputs must be one of \(4,\), got 1"):
        build(spec(name, outputs=1), DATA)


def test_the_networks_of_rgap_have_a_single_logit_for_two_classes() -> None:
    assert build_layout(spec("cnn6"), TWO)[13].out_features == 1
    assert build_layout(spec("mlp"), TWO)[3].out_features == 2
    with pytest.raises(ValueError, match="returns 1, but 2 classes need 2"):
        build(spec("cnn6", outputs=2), TWO)


@pytest.mark.parametrize("name", ["mlp", "lenet_dlg", "resnet18", "cnn6"])
def test_a_layout_is_the_model_without_its_values(name: str) -> None:
    empty, full = build_layout(spec(name), DATA), build(spec(name), DATA)
    assert all(t.is_meta for t in empty.state_dict().values())
    shapes = [{key: (t.shape, t.dtype) for key, t in model.state_dict().items()} for model in (empty, full)]
    assert shapes[0] == shapes[1]
    assert [type(m) for m in empty.modules()] == [type(m) for m in full.modules()]
