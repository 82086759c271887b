"""Fixtures of tests of scoring: one thread, and the folder of data that is too large for the repository."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for PyTorch, as more threads slow computations on small images down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of large data: FEDLEAK_DATA, or shared/data beside the repository; tests that need it are skipped without it."""
    given = os.environ.get("FEDLEAK_DATA")
    folder = Path(given) if given else Path(__file__).parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; FEDLEAK_DATA can name another folder")
    return folder
