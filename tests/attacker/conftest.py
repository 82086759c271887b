"""Fixtures: a copy of a finished federation, and inferred orders of examples that are computed only once."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attacker.attacks.labels import observed
from attacker.attacks.labels.step_labels import InferredOrder
from attacker.attacks.matching import polishing

signal.signal(signal.SIGINT, signal.default_int_handler)  # background shells ignore SIGINT


@pytest.fixture(scope="session")
def inferred_orders() -> dict[bytes, tuple[InferredOrder | None, Tensor]]:
    """Orders of examples inferred so far, with the state of the random generator after it, by what they were inferred from."""
    return {}


@pytest.fixture
def orders_inferred_once(
    inferred_orders: dict[bytes, tuple[InferredOrder | None, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infer the order of a client's examples, which takes seconds, only once for all tests with the same update."""
    infer = observed.infer_step_order

    def find(seen: Any, i: int, labels: Tensor, rng: torch.Generator, *, known: bool) -> InferredOrder | None:
        facts = [*(g[i] for g in seen.gradients.values()), labels, rng.get_state()]
        key = repr((seen.training, known)).encode() + b"".join(t.detach().cpu().numpy().tobytes() for t in facts)
        if key not in inferred_orders:
            inferred_orders[key] = infer(seen, i, labels, rng, known=known), rng.get_state()
        rng.set_state(inferred_orders[key][1])
        return inferred_orders[key][0]

    for module in (observed, polishing):
        monkeypatch.setattr(module, "infer_step_order", find)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Folder of a copy of the finished federation of a test's module."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
