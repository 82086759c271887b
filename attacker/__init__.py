"""The attacker: replays a recording, reconstructs, scores and reports."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in fedsim: PyTorch's threads sleep while they wait
