"""Tests of all registered models: published shapes and initial weights, reproducibility by seed, and the last layer."""

import pytest
import torch
from torch import nn

from fedsim.models import MODELS, build, find_head, has_head
from fedsim.recording import DataSpec, ModelSpec

IMAGES = DataSpec(shape=(3, 32, 32), num_classes=106)
ROWS = DataSpec(shape=(30,), num_classes=2)
ARGUMENTS = {"torchvision": {"architecture": "mobilenet_v3_small"}}
SMALLEST = {"lenet_rog": 4, "vgg7": 8}
PRESCRIBED = {"imprint": ("0.",)}
"""Prefixes of the names of parameters that are not drawn at random, by model."""
SPECS = [ModelSpec(name=name, arguments=ARGUMENTS.get(name, {})) for name in sorted(MODELS)]
every_model = pytest.mark.parametrize("spec", SPECS, ids=str)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@every_model
@pytest.mark.parametrize("shape", [(3, 17, 17), (1, 9, 14), (2, 1, 1)])
def test_every_model_maps_images_to_logits_or_refuses_their_size(spec: ModelSpec, shape: tuple[int, ...]) -> None:
    data = DataSpec(shape=shape, num_classes=7)
    if shape[1] < SMALLEST.get(spec.name, 0):
        with pytest.raises(ValueError, match=r"at least \dx\d pixels, and these have 1x1"):
            build(spec, data)
    elif spec.name == "torchvision" and shape[0] != 3:
        with pytest.raises(ValueError, match=f"images of 3 channels, and these have {shape[0]}"):
            build(spec, data)
    else:
        assert build(spec, data).eval()(torch.rand(5, *shape)).shape == (5, 7)


@every_model
def test_every_model_accepts_rows_or_refuses_them_with_advice(spec: ModelSpec) -> None:
    if spec.name in ("mlp", "fcn3"):
        assert build(spec, DataSpec(shape=(30,), num_classes=3))(torch.rand(4, 30)).shape == (4, 3)
    else:
        with pytest.raises(ValueError, match=r"rows of shape \(30,\).*'mlp'"):
            build(spec, ROWS)


@pytest.mark.parametrize("name", ["lenet_dlg", "lenet_cpl"])
def test_lenets_start_uniform_between_minus_and_plus_one_half(name: str) -> None:
    for tensor in parameters(build(ModelSpec(name=name), IMAGES, seed=1)).values():
        assert tensor.min() >= -0.5
        assert tensor.max() < 0.5
    values = torch.cat([t.flatten() for t in parameters(build(ModelSpec(name=name), IMAGES, seed=1)).values()]).double()
    n = len(values)
    assert values.min() < -0.499
    assert values.max() > 0.499
    assert abs(values.mean()) < 4 * (1 / 12) ** 0.5 / n**0.5
    assert abs(values.var() - 1 / 12) < 4 * (1 / 180) ** 0.5 / n**0.5
    deciles = torch.histc(values, bins=10, min=-0.5, max=0.5)
    assert ((deciles - n / 10).abs() < 5 * (n * 0.09) ** 0.5).all()


@every_model
def test_a_seed_repeats_another_differs_and_the_global_generator_is_left_alone(spec: ModelSpec) -> None:
    data = DataSpec(shape=(3, 8, 8), num_classes=4)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = parameters(build(spec, data, seed=4))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    again, other = (parameters(build(spec, data, seed=seed)) for seed in (4, 5))
    assert all(torch.equal(first[key], again[key]) for key in first)
    fixed = PRESCRIBED.get(spec.name, ())
    drawn = [key for key, tensor in first.items() if tensor.numel() > 1 and tensor.std() > 0 and not key.startswith(fixed)]
    assert drawn
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


def test_a_lenet_is_convolutions_sigmoids_and_one_linear_layer() -> None:
    """The output equals that of functional operations with the published strides."""
    model = build(ModelSpec(name="lenet_cpl"), IMAGES, seed=2)
    p, x = parameters(model), torch.rand(2, 3, 32, 32)
    kernels = [name.removesuffix(".weight") for name in p if name.endswith("weight")]
    out = x
    for name, stride in zip(kernels[:-1], (2, 2, 1, 1), strict=True):
        out = torch.sigmoid(nn.functional.conv2d(out, p[f"{name}.weight"], p[f"{name}.bias"], stride=stride, padding=2))
    assert out.shape == (2, 12, 8, 8)
    last = kernels[-1]
    assert torch.allclose(model(x), out.flatten(1) @ p[f"{last}.weight"].T + p[f"{last}.bias"], atol=1e-4)


@every_model
def test_the_head_is_the_layer_of_the_logits(spec: ModelSpec) -> None:
    """Its bias has the gradient softmax minus one-hot, and its weight that times the features; attacks infer labels from this."""
    model = build(spec, DataSpec(shape=(3, 8, 8), num_classes=7)).eval()
    weight, bias = find_head(model)
    named, features = dict(model.named_parameters()), []
    model.get_submodule(weight.rpartition(".")[0]).register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    logits = model(torch.rand(1, 3, 8, 8))
    wanted = [named[name] for name in (weight, bias) if name is not None]
    gradient, *of_bias = torch.autograd.grad(nn.functional.cross_entropy(logits, torch.tensor([5])), wanted)
    expected = logits.softmax(1)[0].detach() - nn.functional.one_hot(torch.tensor(5), 7)
    assert torch.allclose(gradient, torch.outer(expected, features[0][0]), atol=1e-6)
    assert all(torch.allclose(g, expected, atol=1e-6) for g in of_bias)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(2, 3), ("weight", "bias")),
        (nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2, bias=False)), ("2.weight", None)),
        (nn.Sequential(nn.Sequential(nn.Linear(2, 3))), ("0.0.weight", "0.0.bias")),
    ],
)
def test_head_names(model: nn.Module, expected: tuple[str, str | None]) -> None:
    assert find_head(model) == expected


def test_head_has_as_many_outputs_as_there_are_classes() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier, self.hidden, self.unused = nn.Linear(4, 5), nn.Linear(12, 4), nn.Linear(4, 7)

    data = DataSpec(shape=(3, 2, 2), num_classes=5)
    assert find_head(HeadFirst(), data) == ("classifier.weight", "classifier.bias")
    assert has_head(HeadFirst(), data)
    gated = nn.Sequential(nn.Linear(12, 4), nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 5, 1), nn.Flatten())
    assert not has_head(gated, data)
    with pytest.raises(ValueError, match="no linear layer with 5 outputs"):
        find_head(gated, data)


def test_a_model_without_a_linear_layer_has_no_head() -> None:
    with pytest.raises(ValueError, match="Conv2d has no linear layer"):
        find_head(nn.Conv2d(1, 1, 1))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ModelSpec(name="lenet"), r"unknown name 'lenet' in the registry fedsim\.models.*lenet_cpl, lenet_dlg, .*mlp"),
        (ModelSpec(name="os.system"), "unknown name 'os.system'"),
        (ModelSpec(name="mlp", arguments={"hiden": [3]}), r"mlp: .*'hiden'.*Its parameters: \(hidden: "),
        (ModelSpec(name="lenet_cpl", arguments={"chanels": 3}), r"lenet_cpl: .*'chanels'.*channels"),
    ],
)
def test_unknown_names_and_arguments_say_what_exists(spec: ModelSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(spec, IMAGES)
