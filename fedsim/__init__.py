"""Federated training, recorded as an honest-but-curious server sees it."""

import os

# Set before Flower or Ray is imported: no telemetry, and Ray does not hide GPUs from clients that reserve none.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Set before PyTorch is imported: its threads sleep while they wait. Spinning ones take the cores that other work needs, even from
# the thread that they wait for: on two busy cores an attack with two threads took 300 s of CPU time instead of 9.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
