"""Fixtures for small federations with secure aggregation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsim.secagg.protocol.masks import Words


@pytest.fixture
def some_words() -> Callable[[int], dict[int, Words]]:
    """A function that draws a vector of 50 random 32-bit words for each of a number of clients, counted from 1."""

    def make(clients: int) -> dict[int, Words]:
        rng = np.random.default_rng(0)
        return {i: rng.integers(0, 2**32, 50, dtype=np.uint32) for i in range(1, clients + 1)}

    return make


SECURE: dict[str, Any] = {"clients": {"count": 5}, "secure_aggregation": True}


@pytest.fixture
def experiment(tiny: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns an experiment of five clients with secure aggregation, with the given keys replaced."""
    return lambda **changes: tiny(**{**SECURE, **changes})


@pytest.fixture
def federate(federate: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs the experiment with secure aggregation in this process and returns the `FederationRun`."""
    return lambda *name, **changes: federate(*name, **{**SECURE, **changes})
