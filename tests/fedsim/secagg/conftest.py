"""Small federations with secure aggregation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsim.secagg.protocol.masks import Words


@pytest.fixture
def some_words() -> Callable[[int], dict[int, Words]]:
    """For so many clients, 50 words each."""

    def make(clients: int) -> dict[int, Words]:
        rng = np.random.default_rng(0)
        return {i: rng.integers(0, 2**32, 50, dtype=np.uint32) for i in range(1, clients + 1)}

    return make


SECURE: dict[str, Any] = {"clients": {"count": 5}, "secure_aggregation": True}


@pytest.fixture
def experiment(tiny: Callable[..., Any]) -> Callable[..., Any]:
    """Of five clients with digits, some top-level keys replaced."""
    return lambda **changes: tiny(**{**SECURE, **changes})


@pytest.fixture
def federate(federate: Callable[..., Any]) -> Callable[..., Any]:
    """Run that experiment in this process; returns the `FederationRun`."""
    return lambda *name, **changes: federate(*name, **{**SECURE, **changes})
