"""Measures of reconstructions against their originals, as fields of score rows. A measure that cannot be computed is None."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attacker.attacks.learned.perceptual import Lpips, explain_missing
from attacker.scoring.metrics import (
    is_flat,
    is_recovered,
    measure_categorical_share,
    measure_continuous_error,
    mse,
    psnr,
    ssim,
    ssim_global,
)
from fedsim.recording import DataSpec

MEASURES = ("mse", "mse_raw", "psnr", "ssim", "ssim_global", "lpips", "lpips_net", "continuous_error", "categorical_right")
EXACT_TOLERANCE = 1e-3
"""Largest error of a number in a row that counts as matched exactly, as a share of its range."""
MEASURE_FIELDS = (*MEASURES, "exact_match", "flat")

MeasuredRow = dict[str, Any]
Fields = dict[str, Sequence[Any]]


def measure(raw: Tensor, truth: Tensor, spec: DataSpec, perceptual: Lpips | str) -> list[MeasuredRow]:
    """Return one dict for each pair of a reconstruction and its original: fields of the pair's `ScoreRow`, by name.

    raw: (N, *shape), the reconstructions as the attack returned them. `mse_raw` is computed from them, and is None if it is NaN
    or infinite. All other measures are computed from `clean_examples(raw)`, which replaces NaN by 0; for `mse`, one-hot columns
    are clamped to [0, 1], too. truth: (N, *shape), the originals.
    perceptual: the LPIPS model, or the reason why there is none, which then becomes the field `lpips_reason` of images.
    """
    x = clean_examples(raw, spec)
    fields: Fields = {"mse": to_numbers(mse(x.clamp(0, 1), truth)), "mse_raw": to_numbers(mse(raw, truth))}
    if spec.is_image:
        fields |= {"success": is_recovered(x, truth, spec).tolist(), **_measure_images(x, truth, perceptual)}
    else:
        fields |= _measure_rows(x, truth, spec)
    return [
        {**dict.fromkeys(MEASURE_FIELDS), **{name: values[i] for name, values in fields.items()}, "failure": None}
        for i in range(len(truth))
    ]


def clean_examples(raw: Tensor, spec: DataSpec) -> Tensor:
    """Return reconstructions (N, *shape) with 0 for NaN, clamped to [0, 1] except in one-hot columns.

    One-hot columns are not clamped, since the reconstructed category is the one with the largest value, and several values may
    exceed 1.
    """
    x = raw.nan_to_num()
    categorical = torch.tensor([column.kind == "categorical" for column in spec.columns] or [False])
    return torch.where(categorical, x, x.clamp(0, 1))


def make_empty_measures(failure: str, spec: DataSpec) -> MeasuredRow:
    """Return the fields of `measure` for an example without a reconstruction.

    `success` is False, and `exact_match` as well for table rows. `failure` is the given reason, `lpips_reason` is a text, and all
    other fields are None.
    """
    missed = {"success": False} if spec.is_image else {"success": False, "exact_match": False}
    return {**dict.fromkeys(MEASURE_FIELDS), "lpips_reason": "no reconstruction", "failure": failure, **missed}


def _measure_images(x: Tensor, truth: Tensor, perceptual: Lpips | str) -> Fields:
    """Return the measures of images (N, C, H, W) besides errors: a dict from a score row's field to N values.

    These are PSNR, two kinds of SSIM, LPIPS with its backbone or the reason why it is missing, and flatness. Measures that are
    not defined for images of this size or number of channels are left out. x: after `clean_examples`.
    """
    fields: Fields = {"psnr": to_numbers(psnr(x, truth)), "flat": is_flat(truth).tolist()}
    if min(truth.shape[-2:]) >= 11:
        fields["ssim"] = to_numbers(ssim(x, truth))
    if truth.shape[1] in (1, 3):
        fields["ssim_global"] = to_numbers(ssim_global(x, truth))
    reason = perceptual if isinstance(perceptual, str) else explain_missing(perceptual.net, tuple(truth.shape[1:]))
    if isinstance(perceptual, str) or reason:
        return {**fields, "lpips_reason": [reason] * len(truth)}
    nets, reasons = [perceptual.net] * len(truth), [None] * len(truth)
    return {**fields, "lpips": to_numbers(perceptual(x, truth)), "lpips_net": nets, "lpips_reason": reasons}


def _measure_rows(x: Tensor, truth: Tensor, spec: DataSpec) -> Fields:
    """Return the measures of table rows (N, F) besides their MSE: a dict from a score row's field to N values.

    These are errors, share of right categories, exact match and success, and the reason why LPIPS is missing. x: after
    `clean_examples`.
    """
    errors, right = measure_continuous_error(x, truth, spec.columns), measure_categorical_share(x, truth, spec.columns)
    return {
        "continuous_error": to_numbers(errors),
        "categorical_right": to_numbers(right),
        "exact_match": (~(errors > EXACT_TOLERANCE) & ~(right < 1)).tolist(),
        "success": is_recovered(x, truth, spec).tolist(),
        "lpips_reason": ["not an image"] * len(truth),
    }


def to_numbers(values: Tensor) -> list[float | None]:
    """Convert to floats, with None for infinite values and NaN, which JSON cannot represent."""
    return [float(value) if bool(value.isfinite()) else None for value in values]
