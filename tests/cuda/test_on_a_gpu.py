"""Tests that need a GPU: the same results as on the CPU, planned and released memory, bfloat16, and resumed replays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import federate, make_replay
from torch import Tensor

from attacker.attacks import AttackSpec, Case
from attacker.attacks.gradients.hardware import get_fast_dtype
from attacker.reconstruction import Reconstruction
from attacker.replay.batching import MEMORY_SHARE, CaseFootprint, divide_memory
from attacker.replay.replay import Replay
from defenses.inputs import InputsSpec
from fedsim.recording import Recording

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

ATTACKS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("cpl", "lenet_cpl", {"steps": 3}),
    ("cpl", "lenet_cpl", {"steps": 3, "optimiser": "wolfe", "tv": 1e-4}),
    ("dlg", "lenet_dlg", {"steps": 2}),
    ("inverting_gradients", "resnet20_4", {"steps": 3}),
    ("exact", "mlp", {}),
    ("exact", "lenet_dlg", {}),
    ("rgap", "lenet_dlg", {}),
)


PHOTOS = {"name": "photos", "size": 32}


def read_cases(run: Path) -> list[Case]:
    recording = Recording(run / "recording")
    return [Case((recording.read_observation(row),)) for row in recording.read_rows()]


def answers(spec: AttackSpec, given: list[Case], device: str) -> Tensor:
    found = spec.build(device=device)(given, rng=torch.Generator().manual_seed(0))
    assert {one.x.device.type for one in found} == {"cpu"}  # where reconstructions are written and scored
    return torch.cat([one.x for one in found])


@pytest.mark.parametrize(("name", "model", "arguments"), ATTACKS)
@pytest.mark.parametrize("null", [False, True])
def test_an_attack_gives_the_same_result_on_the_gpu_as_on_the_cpu(
    tmp_path: Path, name: str, model: str, arguments: Mapping[str, Any], null: bool
) -> None:
    """Only rounding in float32 differs: the start is drawn on the CPU, and the iterations are few."""
    given = read_cases(federate(tmp_path / "run", model=model, data=PHOTOS))
    spec = AttackSpec(name=name, arguments=arguments, null=null)
    there, here = (answers(spec, given, device) for device in ("cuda", "cpu"))
    assert (there - here).abs().median() < 0.02


def test_clients_train_on_the_gpu_as_on_the_cpu(tmp_path: Path) -> None:
    updates = []
    for device in ("cpu", "cuda"):
        run = federate(tmp_path / device, model="lenet_cpl", data=PHOTOS, device=device)
        updates.append([one.update for one in Recording(run / "recording").read_observations()])
    for here, there in zip(*updates, strict=True):
        for name, update in here.items():
            torch.testing.assert_close(there[name], update, rtol=1e-3, atol=1e-5)


def test_memory_is_planned_by_what_is_free() -> None:
    torch.cuda.empty_cache()
    before, _ = divide_memory("cuda")
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    during, _ = divide_memory("cuda")
    assert before - during == pytest.approx(MEMORY_SHARE * held.numel(), rel=0.2)


@pytest.mark.parametrize(("model", "limit"), [("lenet_cpl", 1.5), ("resnet20_4", 1.5)])
def test_a_chunk_takes_no_more_than_is_planned_for_it(tmp_path: Path, model: str, limit: float) -> None:
    """The peak memory of a chunk (observations attacked together) is below `limit` times the estimate, which omits workspaces."""
    run = federate(tmp_path / "run", model=model, data=PHOTOS, clients=8)
    given = read_cases(run)
    planned = len(given) * CaseFootprint(Recording(run / "recording").manifest, "cuda").estimate_bytes((1,))
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    answers(AttackSpec(name="inverting_gradients", arguments={"steps": 2}), given, "cuda")
    assert torch.cuda.max_memory_allocated() - base < limit * planned + 2**28


def test_a_chunk_that_does_not_fit_in_gpu_memory_is_still_attacked(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", model="lenet_cpl", data=PHOTOS, clients=8)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    spec = AttackSpec(name="inverting_gradients", arguments={"steps": 2})
    answers(spec, read_cases(run), "cuda")
    peak = torch.cuda.max_memory_allocated() - base
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.7 * peak + 2**27) / total)
    try:
        replay = make_replay(run, spec, out=tmp_path / "out", device="cuda", chunk=8)
        assert replay.run().done == 8
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_nothing_stays_on_the_gpu_after_a_replay(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", model="lenet_cpl", data=PHOTOS)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for seed in range(3):
        spec = AttackSpec(name="cpl", arguments={"steps": 2})
        make_replay(run, spec, out=tmp_path / "out", device="cuda", seed=seed).run()
    assert torch.cuda.memory_allocated() - before < 2**24


def test_a_replay_interrupted_on_the_gpu_is_finished_with_the_same_result(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", model="lenet_cpl", data=PHOTOS)
    recording, spec = Recording(run / "recording"), AttackSpec(name="cpl", arguments={"steps": 6})
    whole = Replay(recording=recording, spec=spec, out=tmp_path / "whole", device="cuda")
    whole.run()
    stopped = Replay(recording=recording, spec=spec, out=tmp_path / "stopped", device="cuda", every=0.0)
    calls = 0

    def stop(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.run(stop)
    again = Replay(recording=recording, spec=spec, out=tmp_path / "stopped", device="cuda", every=0.0)
    assert again.run().failed == {}
    for row in recording.read_rows():
        there, here = (Reconstruction.read(replay.make_path(row.key)).x for replay in (whole, again))
        torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-2)


def test_bfloat16_gives_finite_results_near_those_of_float32(tmp_path: Path) -> None:
    if get_fast_dtype("cuda") is None:
        pytest.skip("this GPU has no bfloat16 of its own")
    given = read_cases(federate(tmp_path / "run", model="resnet20_4", data=PHOTOS))
    exact, coarse = (
        answers(AttackSpec(name="agic", arguments={"steps": 10, "coarse": share}), given, "cuda") for share in (0.0, 0.8)
    )
    assert coarse.isfinite().all()
    assert (exact - coarse).abs().mean() < 0.1


def test_two_searches_share_one_gpu(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", model="lenet_cpl", data=PHOTOS, clients=4)
    spec = AttackSpec(name="cpl", arguments={"steps": 2})
    replay = make_replay(run, spec, out=tmp_path / "out", device="cuda", chunk=1, workers=2)
    result = replay.run()
    assert (result.done, result.failed) == (4, {})


@pytest.mark.parametrize("defense", ["mixup", "instahide(2)"])
def test_examples_are_mixed_by_a_generator_of_the_gpu(defense: str) -> None:
    mixing = InputsSpec.parse(defense).build()
    x, y = torch.rand(4, 3, 8, 8, device="cuda"), torch.eye(4, device="cuda")
    mixed, labels = mixing.mix(x, y, torch.Generator("cuda").manual_seed(0), None)
    assert (mixed.device.type, mixed.shape) == ("cuda", x.shape)
    assert torch.allclose(labels.sum(dim=1), torch.ones(4, device="cuda"))
