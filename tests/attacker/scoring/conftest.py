"""Data and weights that are too large for the repository."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These images are too small for more, which only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder beside the repository, or where FEDLEAK_DATA says; tests that need it are skipped where it is absent."""
    given = os.environ.get("FEDLEAK_DATA")
    folder = Path(given) if given else Path(__file__).parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; FEDLEAK_DATA can name another folder")
    return folder
