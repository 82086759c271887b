"""Tests of the measured time of one evaluation."""

from collections.abc import Iterator

import pytest
import torch

from attacker.attacks.timing import time_call


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_an_evaluation_is_measured_on_one_thread() -> None:
    used: list[int] = []
    assert time_call(lambda: used.append(torch.get_num_threads()), "cpu") >= 0
    assert used == [1, 1]
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_number_of_threads_is_restored_after_an_error() -> None:
    def fail() -> None:
        raise ValueError("no evaluation")

    with pytest.raises(ValueError, match="no evaluation"):
        time_call(fail, "cpu")
    assert torch.get_num_threads() == 3
