"""Tests of learned priors in attacks: an enhancer network applied after a search, and autoencoders as decoders."""

from pathlib import Path

import pytest
import torch
from generators import seed_default, seeded
from observations import observe_steps
from torch import Tensor
from torch.func import vmap

from attacker.attacks import AttackSpec, Case, rog
from attacker.attacks.arguments import list_settable
from attacker.attacks.learned.degradation import degrade
from attacker.attacks.learned.enhancer import READY_FILE, Enhancer, find_enhancer, read_enhancer
from attacker.attacks.learned.networks import Autoencoder
from attacker.attacks.learned.prior_file import PriorFacts, build_network, read_prior, write_prior
from attacker.attacks.matching.names import get_decoder
from attacker.reconstruction import Reconstruction
from defenses.registry import references
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(3, 16, 16), num_classes=4)
MAX_READY_BYTES = 3_000_000
OWN = """
def darker():
    return lambda x: x / 2

def smaller():
    return lambda x: x[..., 1:]
"""


@pytest.fixture
def case() -> Case:
    batch = torch.rand(2, *DATA.shape, generator=seeded()), torch.tensor([1, 3])
    return Case((observe_steps(batch, model=ModelSpec(name="lenet_rog"), data=DATA),))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of an importable module with custom enhancers."""
    (tmp_path / "my_enhancers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_enhancers"


def attack(case: Case, *, null: bool = False, **arguments: object) -> Reconstruction:
    spec = AttackSpec(name="rog", arguments={"steps": 3, **arguments}, null=null)
    return spec.build()([case], rng=seeded())[0]


def test_enhancer_is_applied_to_answer_and_null_and_leaves_confidence_undecided(case: Case) -> None:
    for null in (False, True):
        plain, enhanced = attack(case, null=null), attack(case, null=null, enhancer="small")
        torch.testing.assert_close(enhanced.x, read_enhancer(READY_FILE)(plain.x))
        assert not torch.equal(enhanced.x, plain.x.clamp(0, 1))
        assert any("enhanced by enhancer" in note for note in enhanced.notes)
        assert torch.equal(enhanced.loss, plain.loss)
    pixels = attack(case, decoder="pixels", enhancer="small")
    assert pixels.confidence.isnan().all()
    assert any("no enhancer was calibrated" in note for note in pixels.notes)


def test_shipped_enhancer_is_small_states_its_data_and_improves_images() -> None:
    prior = read_prior(READY_FILE, "enhancer")
    assert READY_FILE.stat().st_size < MAX_READY_BYTES
    assert "tuning part" in prior.facts.data
    assert prior.facts.images > 100
    assert len(prior.facts.data_hash) == len(prior.weights_hash) == 64
    ramps = torch.linspace(0, 1, 64).expand(4, 3, 64, 64)
    discs = ((torch.arange(64) - 32.0)[:, None].square() + (torch.arange(64) - 30.0).square() < 400).float()
    x = (0.2 + 0.3 * ramps + 0.4 * discs).clamp(0, 1)
    enhancer = read_enhancer(READY_FILE)
    given = torch.cat([degrade(x, seeded(seed)).clamp(0, 1) for seed in range(16)])
    errors = [(one - x.repeat(16, 1, 1, 1)).square().mean() for one in (enhancer(given), given)]
    assert errors[0] < 0.85 * errors[1]
    assert (enhancer(x) - x).square().mean() < 2e-4  # 37 dB: it hardly changes images that are not degraded


@pytest.mark.parametrize("shape", [(1, 10, 13), (3, 7, 9), (3, 32, 32)])
def test_images_of_any_size_keep_their_shape(shape: tuple[int, ...]) -> None:
    x = torch.rand(2, *shape, generator=seeded()) * 1.2 - 0.1
    made = read_enhancer(READY_FILE)(x)
    assert made.shape == x.shape
    assert 0 <= float(made.min()) <= float(made.max()) <= 1
    with pytest.raises(ValueError, match="1 or 3 channels, and these have 2"):
        read_enhancer(READY_FILE)(torch.rand(1, 2, 8, 8))


def test_equalize_divides_by_the_largest_value_and_spreads_each_channel() -> None:
    """Of 1,024 pixels, a quarter has a quarter of the largest value, and a half has a half: (1024 - 256) // 255 = 3 per level."""
    levels = torch.tensor([0.2, 0.4, 0.4, 0.8]).repeat_interleave(256).reshape(1, 1, 32, 32)
    x = torch.cat([levels, levels / 2, torch.zeros_like(levels)], dim=1)
    enhancer = find_enhancer("equalize")
    found = enhancer(torch.cat([x, torch.zeros_like(x)]))
    expected = torch.tensor([0, 85 / 255, 85 / 255, 1]).repeat_interleave(256).reshape(32, 32)
    torch.testing.assert_close(found[0], torch.stack([expected, expected, torch.zeros(32, 32)]))
    assert found[1].abs().max() == 0


def test_custom_enhancer_is_used_once_admitted(own: str, case: Case) -> None:
    assert find_enhancer("none") is None
    with pytest.raises(ValueError, match="unknown"):
        find_enhancer("sharp")
    references.admit(f"{own}:darker")
    plain, dark = attack(case), attack(case, enhancer=f"{own}:darker")
    torch.testing.assert_close(dark.x, plain.x.clamp(0, 1) / 2)
    with pytest.raises(ValueError, match="to images of the same shape"):
        Enhancer("smaller", lambda x: x[..., 1:])(torch.zeros(1, 3, 4, 4))


def test_jobs_of_the_service_may_not_name_files() -> None:
    assert list_settable(rog)["enhancer"].words == ("none", "small", "equalize")
    assert not any(word.endswith(".safetensors") for word in list_settable(rog)["decoder"].words)


@pytest.fixture
def autoencoder(tmp_path: Path) -> Path:
    facts = PriorFacts(kind="autoencoder", size=16, settings={"width": 4, "factor": 4}, data="nothing")
    with seed_default(0):
        network = build_network(facts)
    write_prior(tmp_path / "own.safetensors", network, facts)
    return tmp_path / "own.safetensors"


def test_autoencoder_file_can_be_named_as_a_decoder(autoencoder: Path, case: Case) -> None:
    assert get_decoder(str(autoencoder)).__name__ == str(autoencoder)
    decoder, network = get_decoder(str(autoencoder))(DATA), read_prior(autoencoder, "autoencoder").network
    assert isinstance(network, Autoencoder)
    z: Tensor = torch.randn(5, *decoder.shape, generator=seeded())
    assert decoder.shape == (8, 4, 4)
    torch.testing.assert_close(decoder.decode(z), network.decode(z))
    torch.testing.assert_close(vmap(lambda row: decoder.decode(row[None])[0])(z), network.decode(z), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(decoder.encode(decoder.decode(z)), network.encode(network.decode(z)))
    answer = attack(case, decoder=str(autoencoder))
    assert float(answer.loss[-1]) < float(answer.loss[0])
    with pytest.raises(ValueError, match="whose sides 4 divides"):
        get_decoder(str(autoencoder))(DataSpec(shape=(3, 10, 16), num_classes=2))
    with pytest.raises(
        ValueError, match="of kind enhancer or generator or upscaler: this file holds a prior of kind 'autoencoder'"
    ):
        attack(case, enhancer=str(autoencoder))
