"""Fixture: small federations with secure aggregation."""

from collections.abc import Callable
from typing import Any

import pytest
from secure_runs import SECURE


@pytest.fixture
def federate(federate: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs the experiment with secure aggregation in this process and returns the `FederationRun`."""
    return lambda *name, **changes: federate(*name, **{**SECURE, **changes})
