"""Tests of decoders: shapes, ranges, gradients, and searches with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from generators import seeded
from observations import observe_steps
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import interpolate

from attacker.attacks import AttackSpec, Case, cpl, inverting_gradients
from attacker.attacks.learned.deep_prior import CODES, DeepPrior
from attacker.attacks.matching.decoders import BUILT_IN_DECODERS, TANH_MARGIN, Decoder
from attacker.attacks.matching.names import DECODERS, get_decoder
from attacker.attacks.matching.parametrisation import LatentSpace, Parametrisation
from attacker.reconstruction import MAX_RECOVERED_MSE
from defenses.registry import references
from fedsim.recording import DataSpec, ModelSpec

IMAGES = DataSpec(shape=(3, 10, 13), num_classes=4)
ROWS = DataSpec(shape=(9,), num_classes=2)
NETWORKS = ("deep_prior", "shared_prior")
"""Decoders whose latents are weights of networks, and which do not decode what they encode."""
OWN = """
from attacker.attacks.matching.decoders import Decoder

def flipped(data):
    return Decoder(data.shape, decode=lambda z: 1 - z, encode=lambda x: 1 - x)

nothing = 3
"""


@pytest.mark.parametrize("name", BUILT_IN_DECODERS)
def test_decoded_examples_have_the_shape_of_the_data_and_do_not_mix(name: str) -> None:
    own = get_decoder(name)(IMAGES)
    z = torch.rand(4, *own.shape, generator=seeded())
    x = own.decode(z)
    assert x.shape == (4, *IMAGES.shape)
    assert own.encode(x).shape == z.shape
    torch.testing.assert_close(own.decode(z[1:2])[0], x[1])
    torch.testing.assert_close(vmap(lambda row: own.decode(row[None])[0])(z), x)


@pytest.mark.parametrize("name", BUILT_IN_DECODERS)
def test_derivatives_agree_with_finite_differences(name: str) -> None:
    own = get_decoder(name)(DataSpec(shape=(1, 8, 8), num_classes=2))
    z = (0.2 + 0.6 * torch.rand(1, *own.shape, generator=seeded(), dtype=torch.float64)).requires_grad_()
    if name in NETWORKS:  # too many weights for a check of each; derivatives by the network's input and code are 0 on purpose
        count = len(DeepPrior((1, 8, 8), codes=CODES if own.inject else 0).weights)
        weights, entered = z.detach().split([count, own.shape[0] - count], dim=1)
        weights.requires_grad_()
        assert torch.autograd.gradcheck(lambda w: own.decode(torch.cat([w, entered], dim=1)), (weights,), fast_mode=True)
        return
    assert torch.autograd.gradcheck(own.decode, (z,))


@pytest.mark.parametrize("name", [name for name in BUILT_IN_DECODERS if name not in NETWORKS])
def test_encoded_examples_are_decoded_to_nearly_the_same(name: str) -> None:
    own = get_decoder(name)(IMAGES)
    smooth = torch.linspace(0.1, 0.9, 13).expand(2, *IMAGES.shape).contiguous()
    tolerance = 0.2 if name == "coarse_to_fine" else 0.1  # encodes means over 8 pixels
    assert (own.decode(own.encode(smooth)) - smooth).abs().max() < tolerance


def test_pixels_decoder_is_the_identity() -> None:
    own, x = get_decoder("pixels")(IMAGES), torch.randn(2, *IMAGES.shape, generator=seeded())
    assert own.decode(x) is x
    assert torch.equal(own.project(x), x.clamp(0, 1))


def test_bicubic_latents_have_a_quarter_of_the_size_and_keep_constants() -> None:
    own = get_decoder("bicubic4")(IMAGES)
    assert own.shape == (3, 3, 4)
    torch.testing.assert_close(own.decode(torch.full((1, 3, 3, 4), 0.3)), torch.full((1, *IMAGES.shape), 0.3))
    x = own.decode(own.project(torch.randn(50, 3, 3, 4, generator=seeded())))
    assert -0.4 < float(x.min()) < 0
    assert 1 < float(x.max()) < 1.4


def test_displacements_of_all_scales_are_added_to_the_coarse_image() -> None:
    own, large = get_decoder("coarse_to_fine")(IMAGES), list(IMAGES.shape[1:])
    sizes = [3 * -(-large[0] // factor) * -(-large[1] // factor) for factor in (8, 4, 2, 1)]
    assert own.phases == tuple(sizes)
    z = torch.rand(2, sum(sizes), generator=seeded())
    wanted = torch.zeros(2, *IMAGES.shape)
    for factor, part in zip((8, 4, 2, 1), torch.split(z, sizes, dim=1), strict=True):
        small = part.reshape(2, 3, -(-large[0] // factor), -(-large[1] // factor))
        wanted += interpolate(small, size=large, mode="bicubic", align_corners=False)
    torch.testing.assert_close(own.decode(z), wanted)
    x = torch.rand(2, *IMAGES.shape, generator=seeded(1))
    mean = interpolate(interpolate(x, size=[-(-side // 8) for side in large], mode="area"), size=large, mode="bicubic")
    torch.testing.assert_close(own.decode(own.encode(x)), mean)
    boxed = own.project(9 * z - 4)
    assert (float(boxed[:, : sizes[0]].min()), float(boxed[:, sizes[0] :].min()), float(boxed.max())) == (0, -1, 1)


@pytest.mark.parametrize("name", ["bicubic4", "coarse_to_fine"])
def test_bicubic_interpolation_is_refused_for_table_rows(name: str) -> None:
    with pytest.raises(ValueError, match=rf"the decoder {name} needs images, and these data are table rows of shape \(9,\)"):
        get_decoder(name)(ROWS)


def test_tanh_box_stays_in_range_and_encodes_within_a_margin() -> None:
    own = get_decoder("tanh_box")(ROWS)
    x = own.decode(100 * torch.randn(50, 9, generator=seeded()))
    assert 0 <= float(x.min()) <= float(x.max()) <= 1
    assert own.decode(own.encode(torch.tensor([[-3.0, 0.25, 7.0]]))).tolist()[0] == pytest.approx(
        [TANH_MARGIN, 0.25, 1 - TANH_MARGIN], abs=1e-5
    )


def test_latent_holds_examples_then_soft_labels_then_surrogate_weight() -> None:
    space = LatentSpace(Parametrisation(decoder=get_decoder("bicubic4"), boxed=True), IMAGES, 2, joint=True, surrogate=True)
    starts = [torch.rand(2, *IMAGES.shape, generator=seeded(i)) for i in range(3)]
    z = space.encode(starts, [seeded(i) for i in range(3)], "cpu")
    assert z.shape == (3, 2 * 36 + 2 * 4 + 1)
    x, y = space.decode(z, torch.zeros(3, 2))
    assert (x.shape, y.shape) == ((3, 2, *IMAGES.shape), (3, 2, 4))
    torch.testing.assert_close(y.sum(dim=-1), torch.ones(3, 2))
    (alone, _) = space.decode(z[1], torch.zeros(2))
    torch.testing.assert_close(alone, x[1])
    projected = space.project(10 * z - 5)
    assert projected[:, :72].min() >= 0
    assert torch.equal(projected[:, 72:], (10 * z - 5)[:, 72:])


@pytest.fixture
def smooth_case() -> tuple[Case, Tensor]:
    """The attack's input (case), and its image: smooth, so that a quarter of the resolution represents it."""
    data = DataSpec(shape=(1, 16, 16), num_classes=4)
    small = torch.tensor([[0.3, 0.4, 0.5, 0.6], [0.3, 0.5, 0.7, 0.6], [0.4, 0.6, 0.7, 0.5], [0.4, 0.5, 0.5, 0.4]])
    x = get_decoder("bicubic4")(data).decode(small[None, None])
    return Case((observe_steps((x, torch.tensor([1])), model=ModelSpec(name="lenet_dlg"), data=data),)), x


@pytest.mark.parametrize(("name", "decoded_by"), [("cpl", "bicubic4"), ("cpl", "tanh_box"), ("inverting_gradients", "bicubic4")])
def test_smooth_image_is_recovered_with_named_decoders(smooth_case: tuple[Case, Tensor], name: str, decoded_by: str) -> None:
    case, x = smooth_case
    settings: dict[str, Any] = {"optimiser": "wolfe", "steps": 30} if name == "cpl" else {"steps": 400, "tv": 1e-4}
    attack = AttackSpec(name=name, arguments={"decoder": decoded_by, **settings}).build()
    (found,) = attack([case], rng=seeded())
    assert float((found.x - x).square().mean()) < 2e-3
    assert "of the decoders, only 'pixels' and 'smooth' were calibrated" in found.notes[-1]
    assert found.confidence.isnan().all()


@pytest.mark.parametrize("is_easy", [True, False])
def test_answers_of_the_smooth_decoder_are_likely_if_they_are_right(smooth_case: tuple[Case, Tensor], is_easy: bool) -> None:
    """The decoder is an invertible change of variables, so that the evidence on its answers is that on answers in pixels."""
    case, x = smooth_case
    if not is_easy:  # a rough image, and a search that ends far from it
        x = torch.rand(x.shape, generator=seeded()).round()
        case = Case((observe_steps((x, torch.tensor([1])), model=ModelSpec(name="lenet_dlg"), data=case.observations[0].data),))
    attack = cpl(decoder="smooth", init="smooth", optimiser="wolfe", relative=True, steps=50 if is_easy else 2)
    (found,) = attack([case], rng=seeded())
    right = float((found.x.clamp(0, 1) - x).square().mean()) <= MAX_RECOVERED_MSE
    assert right == is_easy
    assert not bool(found.confidence.isnan().any()), found.notes
    assert float(found.confidence[0]) > 0.9 if right else float(found.confidence[0]) < 0.5


def test_small_latent_lowers_the_error_with_noise() -> None:
    data = DataSpec(shape=(1, 16, 16), num_classes=4)
    x = get_decoder("bicubic4")(data).decode(torch.rand(1, 1, 4, 4, generator=seeded(2)))
    noisy = observe_steps((x, torch.tensor([1])), model=ModelSpec(name="lenet_dlg"), data=data, defense="gaussian(0.005)")
    errors = {}
    for name in ("pixels", "bicubic4"):
        (found,) = cpl(optimiser="wolfe", steps=20, decoder=name, denoised=False)([Case((noisy,))], rng=seeded())
        errors[name] = float((found.x - x).square().mean())
    assert errors["bicubic4"] < 0.5 * errors["pixels"]


def test_smooth_decoder_maps_white_noise_to_smooth_images_and_is_inverted() -> None:
    """Neighbouring pixels of the images of white latents differ little; encoding is the exact inverse."""
    own, z = get_decoder("smooth")(IMAGES), torch.randn(200, *IMAGES.shape, generator=seeded(), dtype=torch.float64)
    x = own.decode(z)
    torch.testing.assert_close(own.encode(x), z)
    assert float(x.mean()) == pytest.approx(0.5, abs=0.05)
    assert float((x[..., 1:] - x[..., :-1]).var()) < 0.3 * float(x.var())
    assert get_decoder("smooth")(ROWS).decode(torch.zeros(1, 9)).tolist() == [[0.5] * 9]


def test_default_decoder_is_pixels_and_unknown_names_are_refused() -> None:
    assert cpl().parametrisation.decoder is inverting_gradients().parametrisation.decoder is get_decoder("pixels")
    assert list(DECODERS) == ["bicubic4", "coarse_to_fine", "deep_prior", "pixels", "shared_prior", "smooth", "tanh_box"]
    with pytest.raises(ValueError, match=r"unknown name 'bicubic' in the registry attacker\.decoders"):
        AttackSpec(name="cpl", arguments={"decoder": "bicubic"})


def test_custom_decoder_is_named_by_module_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smooth_case: tuple[Case, Tensor]
) -> None:
    (tmp_path / "own_decoders.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(references.CODE_VARIABLE, "")
    arguments = {"decoder": "own_decoders:flipped", "steps": 4}
    with pytest.raises(ValueError, match="imported only if you ask for it"):
        AttackSpec(name="cpl", arguments=arguments)
    own = references.admit("own_decoders:flipped")
    assert isinstance(own(IMAGES), Decoder)
    case, _ = smooth_case
    (found,) = AttackSpec(name="cpl", arguments=arguments).build()([case], rng=seeded())
    (plain,) = cpl(steps=4)([case], rng=seeded())
    torch.testing.assert_close(found.x, plain.x, rtol=0, atol=2e-2)  # the same search, mirrored
    references.admit("own_decoders:nothing")
    with pytest.raises(ValueError, match="must be something that can be called, got int"):
        get_decoder("own_decoders:nothing")


def make_decoder(**parts: Any) -> Any:
    same = {"shape": (3, 10, 13), "decode": lambda z: z, "encode": lambda x: x}
    return lambda data: Decoder(**{**same, **parts})


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda data: None, "the function must return a `attacker.attacks.matching.decoders.Decoder`, got NoneType"),
        (
            make_decoder(decode=lambda z: z[:, :1]),
            r"decode must map shape \(2, 3, 10, 13\) to \(2, 3, 10, 13\), got \(2, 1, 10, 13\)",
        ),
        (make_decoder(shape=(7,)), r"encode must map shape \(2, 3, 10, 13\) to \(2, 7\), got \(2, 3, 10, 13\)"),
        (make_decoder(decode=lambda z: z.numpy()), "decode must map .* got ndarray"),
        (make_decoder(decode=lambda z: z.nothing), r"decode fails on shape \(2, 3, 10, 13\): AttributeError"),
        (make_decoder(project=lambda z: z.sum()), r"project must map .* got \(\)"),
    ],
)
def test_invalid_decoder_is_refused(factory: Any, words: str) -> None:
    factory.__name__ = "own"
    with pytest.raises(ValueError, match=f"decoder own: {words}"):
        LatentSpace(Parametrisation(decoder=factory), IMAGES, 1).encode([torch.rand(1, *IMAGES.shape)], [seeded()], "cpu")
