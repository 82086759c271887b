"""Tests of generators and denoisers in attacks: decoders, phases of a search, priors, and the search for the nearest image."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from generators import seed_default, seeded
from observations import observe_steps
from torch import Tensor
from torch.func import grad, vmap

from attacker.attacks import AttackSpec, Case, rog
from attacker.attacks.learned import generator
from attacker.attacks.learned.enhancer import find_denoiser, find_enhancer, read_enhancer
from attacker.attacks.learned.generator import ImageGenerator, match_images, measure_distance
from attacker.attacks.learned.prior_file import PriorFacts, PriorKind, build_network, read_prior, write_prior
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.generator_decoders import FEATURE_RADIUS, WEIGHT_UNIT, read_generator
from attacker.attacks.matching.names import get_decoder, get_denoiser_term
from attacker.attacks.matching.priors import DenoiserTerm, measure_noise
from attacker.attacks.optimisers.balls import project_onto_ball
from attacker.attacks.optimisers.first_order import Adam
from attacker.attacks.optimisers.phases import PhasedOptimiser
from attacker.reconstruction import Reconstruction
from defenses.registry import references
from fedsim.recording import DataSpec, ModelSpec
from fedsim.recording.codec import encode

DATA = DataSpec(shape=(3, 16, 16), num_classes=4)
LABELS = torch.tensor([1, 3])


def write(path: Path, kind: PriorKind, **settings: int) -> Path:
    """Write an untrained prior, whose weights are large enough for images that differ."""
    facts = PriorFacts(kind=kind, size=16, settings={"width": 4, **settings}, data="nothing")
    with seed_default(1):
        network = build_network(facts)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    write_prior(path, network, facts)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """File of a generator of four classes with ten latents."""
    return write(tmp_path / "generator.safetensors", "generator", latents=10, side=16, classes=4)


@pytest.fixture
def case() -> Case:
    batch = torch.rand(2, *DATA.shape, generator=seeded()), LABELS
    return Case((observe_steps(batch, model=ModelSpec(name="lenet_rog"), data=DATA),))


def attack(case: Case, *, name: str = "rog", null: bool = False, **arguments: object) -> Reconstruction:
    spec = AttackSpec(name=name, arguments={"steps": 4, **arguments}, null=null)
    return spec.build()([case], rng=seeded())[0]


@pytest.mark.parametrize("word", ["latents", "features", "weights"])
def test_latents_decode_as_the_generator_does_with_gradients_of_autograd(word: str, path: Path) -> None:
    decoder, network = get_decoder(f"{path}@{word}")(DATA), read_generator(path)
    z = torch.zeros(2, *decoder.shape)
    z[:, :10] = torch.randn(2, 10, generator=seeded())
    torch.testing.assert_close(decoder.apply(z, LABELS), network.decode(z[:, :10], LABELS))
    assert not torch.allclose(decoder.apply(z, LABELS), decoder.apply(z, 3 - LABELS))
    z = z + 0.3 * torch.randn(z.shape, generator=seeded(1))
    own = vmap(grad(lambda row, y: decoder.apply(row[None], y[None]).square().sum()))(z, LABELS)
    leaf = z.clone().requires_grad_()
    torch.autograd.backward(decoder.apply(leaf, LABELS).square().sum())
    assert leaf.grad is not None
    torch.testing.assert_close(own, leaf.grad, atol=1e-4, rtol=1e-4)
    assert (own.abs().amax(dim=0) > 0).float().mean() > 0.9
    soft = torch.nn.functional.one_hot(LABELS, 4).float()
    torch.testing.assert_close(decoder.apply(z, soft), decoder.apply(z, LABELS))
    encoded = decoder.encode(torch.rand(3, *DATA.shape, generator=seeded()))
    assert encoded.shape == (3, *decoder.shape)
    assert not encoded[:, 10:].any()


def test_displaced_weights_decode_as_a_generator_with_these_weights(path: Path) -> None:
    decoder, network = get_decoder(f"{path}@weights")(DATA), read_generator(path)
    z = torch.randn(1, *decoder.shape, generator=seeded())
    names = [name for name, _ in network.named_parameters() if name.split(".")[0] in ("expand", "up", "leave")]
    rest = z[0, 10:]
    for name in names:
        p = network.get_parameter(name)
        p.data += WEIGHT_UNIT * p.square().mean().sqrt() * rest[: p.numel()].view_as(p)
        rest = rest[p.numel() :]
    assert not len(rest)
    torch.testing.assert_close(decoder.apply(z, LABELS[:1]), network.decode(z[:, :10], LABELS[:1]), atol=1e-5, rtol=1e-4)


def test_displaced_features_enter_after_their_stages(path: Path) -> None:
    decoder, network = get_decoder(f"{path}@features")(DATA), read_generator(path)
    z = torch.randn(1, *decoder.shape, generator=seeded())
    first = network.run_stage(0, z[:, :10], LABELS[:1]) + z[:, 10 : 10 + 64].reshape(1, 16, 2, 2)
    second = network.run_stage(1, first, LABELS[:1]) + z[:, 74:].reshape(1, 16, 4, 4)
    x = network.run_stage(3, network.run_stage(2, second, LABELS[:1]), LABELS[:1])
    torch.testing.assert_close(decoder.apply(z, LABELS[:1]), x)
    assert decoder.phases == (10, 64, 256)


def test_unsuitable_generators_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown 'pixels' after the file's name"):
        get_decoder(f"{path}@pixels")
    with pytest.raises(ValueError, match=r"makes images of shape \(3, 16, 16\), and these data have shape \(3, 32, 32\)"):
        get_decoder(f"{path}@latents")(DataSpec(shape=(3, 32, 32), num_classes=4))
    with pytest.raises(ValueError, match="knows 4 classes, and these data have 7"):
        get_decoder(f"{path}@latents")(replace(DATA, num_classes=7))
    with pytest.raises(ValueError, match="of kind autoencoder: this file holds a prior of kind 'generator'"):
        get_decoder(str(path))
    with pytest.raises(ValueError, match="multiple of 8, got 12"):
        ImageGenerator(side=12)
    assert len({get_decoder(f"{path}@{word}").__name__ for word in ("latents", "features", "weights")}) == 3
    free = write(tmp_path / "free.safetensors", "generator", latents=10, side=16, classes=1)
    decoder = get_decoder(f"{free}@latents")(replace(DATA, num_classes=7))
    z = torch.randn(2, 10, generator=seeded())
    assert torch.equal(decoder.apply(z, LABELS), decoder.apply(z, 5 * LABELS))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="do not have the hash"):
        get_decoder(f"{path}@weights")


def run_adam(z: Tensor, aim: Tensor, first: int) -> Tensor:
    """Return z (P, D) after the steps `first` to 19 of 20 steps of Adam towards `aim`."""
    stepper = Adam().start()
    for step in range(first, 20):
        z = stepper.step(z, 2 * (z - aim), torch.zeros(len(z)), step / 20)
    return z


def test_each_phase_searches_its_part_alone_from_the_best_latents_and_resumes() -> None:
    aim, z = 9 * torch.randn(3, 11, generator=seeded()), torch.randn(3, 11, generator=seeded(1))
    first, second = torch.tensor([0, 1, 5, 6]), torch.tensor([2, 3, 4, 7, 8, 9])
    optimiser, visited = PhasedOptimiser(Adam(), (2, 3), examples=2), [z]
    stepper = optimiser.start()
    for step in range(40):
        if step in (7, 30):
            saved, stepper = stepper.get_state(), optimiser.start()
            stepper.load(saved)
        at = visited[-1]
        loss = torch.full((3,), -1.0 if step == 12 else 0.0)
        visited.append(stepper.step(at, 2 * (at - aim), loss, step / 40))
    assert torch.equal(visited[21], visited[12])  # the best latents
    assert torch.equal(visited[20][:, second], z[:, second])
    torch.testing.assert_close(visited[20][:, first], run_adam(z[:, first], aim[:, first], 0))
    assert torch.equal(visited[40][:, first], visited[12][:, first])
    torch.testing.assert_close(visited[40][:, second], run_adam(z[:, second], aim[:, second], 1))
    assert not torch.equal(visited[40][:, 10], visited[21][:, 10])


@pytest.mark.parametrize("arguments", [{"latent": 0.1}, {"denoiser_weight": 0.5}])
@pytest.mark.parametrize("name", ["rog", "inverting_gradients"])
@pytest.mark.parametrize("word", ["latents", "weights"])
def test_null_does_not_depend_on_the_update(
    word: str, name: str, arguments: dict[str, Any], path: Path, tmp_path: Path, case: Case
) -> None:
    if "denoiser_weight" in arguments:
        arguments = {**arguments, "denoiser": str(write(tmp_path / "denoiser.safetensors", "denoiser"))}
    (seen,) = case.observations
    other = Case((replace(seen, payload=encode({name: 3 * w for name, w in seen.weights.items()})),), known_labels=LABELS)
    nulls = [attack(one, name=name, null=True, decoder=f"{path}@{word}", **arguments) for one in (case, other)]
    assert torch.equal(nulls[0].x, nulls[1].x)
    if "latent" in arguments:
        assert float(nulls[0].loss[-1]) < float(nulls[0].loss[0])
    found = [attack(one, name=name, decoder=f"{path}@{word}", **arguments) for one in (case, other)]
    assert not torch.equal(found[0].x, found[1].x)
    assert found[0].confidence.isnan().all()


def test_displaced_features_and_weights_explain_more_of_an_update_than_latents(path: Path) -> None:
    batch = torch.rand(2, *DATA.shape, generator=seeded()), LABELS
    smooth = Case((observe_steps(batch, model=ModelSpec(name="lenet_dlg"), data=DATA),))
    losses = {
        word: float(attack(smooth, decoder=f"{path}@{word}", steps=steps, tv=0.0).loss[-1])
        for word, steps in (("latents", 20), ("features", 60), ("weights", 40))
    }
    assert losses["features"] < 0.9 * losses["latents"]
    assert losses["weights"] < 0.97 * losses["latents"]


def test_latents_are_pulled_to_zero_by_their_prior(path: Path, case: Case) -> None:
    network = read_generator(path)
    norms = []
    for weight in (0.0, 10.0):
        found = attack(case, decoder=f"{path}@latents", steps=60, latent=weight, tv=0.0)
        centre = network.decode(torch.zeros(2, 10), found.y)
        norms.append(float((found.x - centre).square().mean()))
    assert norms[1] < 0.1 * norms[0]


def test_gradient_of_the_denoiser_term_is_what_the_denoiser_removes(tmp_path: Path) -> None:
    denoise = find_denoiser(str(write(tmp_path / "denoiser.safetensors", "denoiser")))
    x = torch.rand(2, *DATA.shape, generator=seeded())
    found = grad(lambda x: measure_noise(x, denoise))(x)
    torch.testing.assert_close(found, (x - denoise(x)) / x.numel())
    assert float(measure_noise(x, lambda x: x)) == 0
    assert find_denoiser("none") is None


def test_denoiser_keeps_the_search_near_images_that_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    (tmp_path / "my_denoisers.py").write_text(
        "def grey():\n    return lambda x: 0 * x + 0.5\ndef none():\n    return lambda x: x[:, :1]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("grey", "none"):
        references.admit(f"my_denoisers:{name}")
    settings = {"name": "inverting_gradients", "steps": 60, "polish": 0.0, "denoiser": "my_denoisers:grey"}
    spread = [float((attack(case, **settings, denoiser_weight=weight).x - 0.5).std()) for weight in (0.0, 100.0)]
    assert spread[1] < 0.2 * spread[0]
    with pytest.raises(ValueError, match="a denoiser must map images"):
        attack(case, denoiser="my_denoisers:none")


def test_noise_before_denoising_falls_to_zero_over_a_search_and_is_moved(tmp_path: Path, case: Case) -> None:
    """The denoiser sees the images alone at the end, and before that with other noise in each step."""
    seen = []

    def watch(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    base = rog(steps=4, decoder="pixels")
    batch = CaseBatch(base.copy_with(denoiser=DenoiserTerm(denoise=watch, weight=1.0, noise=0.3)), [case])
    z = torch.full((1, batch.space.size), 0.5)
    problem = batch.build_problem([0], z, LABELS[None])
    for share in (0.0, 0.5, 0.75, 1.0):
        batch.evaluate(z, problem, share)
    noise = [x - 0.5 for x in seen[-4:]]
    for x, wanted in zip(noise, (0.3, 0.15, 0.075, 0.0), strict=True):
        assert float(x.std()) == pytest.approx(wanted, rel=0.1)
    assert float(torch.corrcoef(torch.stack([noise[0].flatten(), noise[1].flatten()]))[0, 1].abs()) < 0.2
    x = torch.rand(2, *DATA.shape, generator=seeded())
    found = grad(lambda x: measure_noise(x, torch.tanh, 0.1 * x.detach()))(x)
    torch.testing.assert_close(found, (x - torch.tanh(1.1 * x)) / x.numel())
    assert get_denoiser_term("none", 1.0, 0.0) is None
    own = str(write(tmp_path / "denoiser.safetensors", "denoiser"))
    assert get_denoiser_term(own, 0.0, 0.0) is None
    with pytest.raises(ValueError, match="must not be negative, got -1 and 0"):
        get_denoiser_term(own, -1, 0)


def test_displaced_features_stay_in_l1_balls_if_boxed(path: Path, case: Case) -> None:
    decoder = get_decoder(f"{path}@features")(DATA)
    z = torch.randn(3, *decoder.shape, generator=seeded())
    found = decoder.project(5 * z)
    assert torch.equal(found[:, :10], 5 * z[:, :10])
    for part in torch.split(found[:, 10:], [64, 256], dim=1):
        torch.testing.assert_close(part.abs().mean(dim=1), torch.full((3,), FEATURE_RADIUS))
    assert torch.equal(decoder.project(0.01 * z), 0.01 * z)
    free, kept = (attack(case, decoder=f"{path}@features", steps=9, learning_rate=3.0, boxed=boxed).x for boxed in (False, True))
    assert not torch.equal(free, kept)


def test_search_for_the_nearest_image_by_frank_wolfe_stays_in_the_ball_and_returns_its_best(path: Path) -> None:
    network = read_generator(path)
    inside = torch.randn(2, 10, generator=seeded())
    x = network.decode(2 * inside / inside.norm(dim=1, keepdim=True), LABELS)
    start = network.decode(project_onto_ball(network.encode(x)[0], 10**0.5), LABELS)
    errors = [measure_distance(match_images(network, x, LABELS, steps=n, optimiser="frank_wolfe"), x, None) for n in (1, 50, 400)]
    torch.testing.assert_close(errors[0], measure_distance(start, x, None))
    assert (errors[1] <= errors[0]).all()
    assert (errors[2] < 0.5 * errors[0]).all()
    far = network.decode(9 * inside, LABELS)  # its latents lie outside
    bounded, free = (match_images(network, far, LABELS, steps=100, optimiser=name) for name in ("frank_wolfe", "adam"))
    assert not torch.allclose(bounded, free)
    assert "frank_wolfe without LPIPS" in read_enhancer(path, optimiser="frank_wolfe").name
    with pytest.raises(ValueError, match="unknown optimiser 'newton'"):
        find_enhancer(f"{path}@newton")


def test_lpips_enters_the_search_for_the_nearest_image(path: Path, tmp_path: Path) -> None:
    """The metric stands for LPIPS: it compares the means of the images, which alone then decide."""

    class Means:
        def compare(self, x: Tensor, truth: Tensor) -> Tensor:
            return 100 * (x.mean(dim=(1, 2, 3)) - truth.mean(dim=(1, 2, 3))).abs()

    network, x = read_generator(path), torch.rand(2, *DATA.shape, generator=seeded())
    plain, measured = (match_images(network, x, LABELS, perceptual=metric, steps=60) for metric in (None, cast(Any, Means())))
    apart = [(made.mean(dim=(1, 2, 3)) - x.mean(dim=(1, 2, 3))).abs() for made in (plain, measured)]
    assert (apart[1] < 0.5 * apart[0] + 1e-3).all()
    with pytest.raises(FileNotFoundError, match="do not exist"):
        find_enhancer(str(path), str(tmp_path / "none.safetensors"))
    network_without_search = write(tmp_path / "enhancer.safetensors", "enhancer")
    with pytest.raises(ValueError, match="prior of kind enhancer, and only a generator is searched"):
        find_enhancer(f"{network_without_search}@frank_wolfe")


def test_nearest_image_of_the_generator_is_found_for_answer_and_null(
    path: Path, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = read_generator(path)
    monkeypatch.setattr(generator, "SEARCH_STEPS", 20)
    x = network.decode(torch.randn(2, 10, generator=seeded()), LABELS)
    start = network.decode(network.encode(x)[0], LABELS)
    found = match_images(network, x, LABELS, steps=150)
    assert (measure_distance(found, x, None) < 0.2 * measure_distance(start, x, None)).all()
    for null in (False, True):
        plain, matched = (attack(case, null=null, enhancer=enhancer) for enhancer in ("none", str(path)))
        assert torch.equal(matched.x, read_enhancer(path)(plain.x, plain.y))
        assert any("enhanced by generator" in note for note in matched.notes)
    with pytest.raises(ValueError, match="makes images of shape"):
        read_enhancer(path)(torch.rand(1, 3, 24, 24), LABELS[:1])
    assert isinstance(read_prior(path, "enhancer", "generator").network, ImageGenerator)
