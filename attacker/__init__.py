"""The attacker's side: attacks on recorded federated training, and their replay, scoring, audits, reports and web service."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in fedsim: PyTorch's threads sleep while they wait
