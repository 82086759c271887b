"""Measures of reconstructions against their originals, as fields of rows. A measure that cannot be computed is None."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attacker.scoring.metrics import is_flat, mse, psnr, ssim, ssim_global, succeeded
from attacker.scoring.perceptual import Lpips, unable
from attacker.scoring.tables import categorical_right, continuous_error
from fedsim.recording import DataSpec

MEASURES = ("mse", "mse_raw", "psnr", "ssim", "ssim_global", "lpips", "lpips_net", "continuous_error", "categorical_right")
FIELDS = (*MEASURES, "flat")

MeasuredRow = dict[str, Any]
Fields = dict[str, Sequence[Any]]


def measure(raw: Tensor, truth: Tensor, spec: DataSpec, perceptual: Lpips | str) -> list[MeasuredRow]:
    """One row of measures for each pair.

    raw, truth: (N, *shape), raw as the attack gave it: only `mse_raw` is measured on that, the others on `answered`.
    perceptual: LPIPS, or why there is none.
    """
    x = answered(raw, spec)
    fields: Fields = {"mse": _numbers(mse(x.clamp(0, 1), truth)), "mse_raw": _numbers(mse(raw, truth))}
    if spec.is_image:
        fields |= {"success": succeeded(x, truth, spec).tolist(), **_of_images(x, truth, perceptual)}
    else:
        fields |= _of_rows(x, truth, spec)
    return [
        {**dict.fromkeys(FIELDS), **{name: values[i] for name, values in fields.items()}, "failure": None}
        for i in range(len(truth))
    ]


def answered(raw: Tensor, spec: DataSpec) -> Tensor:
    """Return reconstructions (N, *shape) without NaN, clamped to [0, 1].

    One-hot columns are not clamped: the largest value is the answer, and several may exceed 1.
    """
    x = raw.nan_to_num()
    categorical = torch.tensor([column.kind == "categorical" for column in spec.columns] or [False])
    return torch.where(categorical, x, x.clamp(0, 1))


def not_measured(failure: str) -> MeasuredRow:
    """Return the same fields for an example without a reconstruction."""
    return {**dict.fromkeys(FIELDS), "lpips_reason": "no reconstruction", "success": False, "failure": failure}


def _of_images(x: Tensor, truth: Tensor, perceptual: Lpips | str) -> Fields:
    fields: Fields = {"psnr": _numbers(psnr(x, truth)), "flat": is_flat(truth).tolist()}
    if min(truth.shape[-2:]) >= 11:
        fields["ssim"] = _numbers(ssim(x, truth))
    if truth.shape[1] in (1, 3):
        fields["ssim_global"] = _numbers(ssim_global(x, truth))
    reason = perceptual if isinstance(perceptual, str) else unable(perceptual.net, tuple(truth.shape[1:]))
    if isinstance(perceptual, str) or reason:
        return {**fields, "lpips_reason": [reason] * len(truth)}
    nets, reasons = [perceptual.net] * len(truth), [None] * len(truth)
    return {**fields, "lpips": _numbers(perceptual(x, truth)), "lpips_net": nets, "lpips_reason": reasons}


def _of_rows(x: Tensor, truth: Tensor, spec: DataSpec) -> Fields:
    return {
        "continuous_error": _numbers(continuous_error(x, truth, spec.columns)),
        "categorical_right": _numbers(categorical_right(x, truth, spec.columns)),
        "success": succeeded(x, truth, spec).tolist(),
        "lpips_reason": ["not an image"] * len(truth),
    }


def _numbers(values: Tensor) -> list[float | None]:
    """As JSON knows them: None for what is no number."""
    return [float(value) if bool(value.isfinite()) else None for value in values]
