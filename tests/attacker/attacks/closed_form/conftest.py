"""Test settings: one thread, since the networks are small, and imports of benchmarks, which supply networks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))  # at the end: its defenses.py is no package


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
