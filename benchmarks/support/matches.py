"""How many originals the answers of an attack match, in any order, and how many answers match none."""

import torch
from torch import Tensor

from attacker.attacks import Attack, Case
from attacker.reconstruction import Reconstruction
from attacker.scoring.metrics import psnr
from support.attacked import run_attack
from support.contract import Options

EXACT_DB = 60.0
"""PSNR above which an image counts as exact."""
SUCCESS_DB = 20.46
"""PSNR of the mean squared error at which scoring counts an image as recovered."""
CERTAIN = 0.9
"""Confidence above which an answer counts as certain."""


def run_if_applicable(attack: Attack, case: Case, options: Options) -> Reconstruction | None:
    """Return the attack's answer to a case, or None if it recovers no example or cannot attack the case."""
    try:
        return run_attack(attack, [case], options)[0][0]
    except ValueError:
        return None


def measure_matches(found: Tensor, x: Tensor) -> Tensor:
    """Return the PSNR in dB between M reconstructions, first clamped to [0, 1], and N originals, as a matrix (M, N)."""
    return torch.stack([psnr(one.expand_as(x), x) for one in found.clamp(0, 1)]) if len(found) else torch.zeros(0, len(x))


def count_exact(answer: Reconstruction | None, x: Tensor, least: float = EXACT_DB) -> int:
    """Return the number of originals x to which some reconstruction has a PSNR above `least` dB; 0 if `answer` is None."""
    return 0 if answer is None else int((measure_matches(answer.x, x) > least).any(dim=0).sum())


def count_wrong(answer: Reconstruction | None, x: Tensor) -> int:
    """Return the number of reconstructions whose PSNR to every original in x is at most `EXACT_DB`; 0 if `answer` is None."""
    return 0 if answer is None else int((measure_matches(answer.x, x) <= EXACT_DB).all(dim=1).sum())


def count_false(answer: Reconstruction | None, x: Tensor, success: float = SUCCESS_DB) -> tuple[int, int]:
    """Count the reconstructions with a confidence above `CERTAIN`: return how many of them are wrong, and their number.

    A reconstruction is wrong if its PSNR is at most `success` dB to every original in x (N, *shape).
    """
    if answer is None:
        return 0, 0
    sure = answer.confidence > CERTAIN
    wrong = (measure_matches(answer.x, x) <= success).all(dim=1)
    return int((sure & wrong).sum()), int(sure.sum())
