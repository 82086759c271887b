"""Checks of arguments, shared by the functions that build models."""

from collections.abc import Sequence


def check_image(shape: tuple[int, ...], what: str) -> tuple[int, int, int]:
    """Return `shape` as (C, H, W). Raises ValueError if it does not have three dimensions. what: the model, for the message."""
    if len(shape) != 3:
        raise ValueError(f"{what} takes images (C, H, W), and these data are rows of shape {shape}; use the model 'mlp'")
    return shape[0], shape[1], shape[2]


def check_side(shape: tuple[int, int, int], side: int, what: str) -> None:
    """Raise ValueError if images of this shape (C, H, W) have less than `side` pixels in height or width.

    what: the model, for the message.
    """
    if min(shape[1:]) < side:
        raise ValueError(
            f"{what} takes images of at least {side}x{side} pixels, and these have {shape[1]}x{shape[2]}; use another model"
        )


def check_widths(values: object, what: str) -> list[int]:
    """Return `values`, the widths of layers, as a list; it may be empty.

    Raises ValueError, naming `what`, unless `values` is a list or another sequence of whole numbers above 0.
    """
    if not isinstance(values, Sequence) or isinstance(values, str) or not all(_is_width(value) for value in values):
        raise ValueError(f"{what} must be a list of whole numbers above 0, got {values!r}")
    return list(values)


def check_bool(value: object, what: str) -> bool:
    """Return `value`. Raises ValueError, naming `what`, if it is not a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false, got {value!r}")
    return value


def _is_width(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
