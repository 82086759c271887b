"""Conversion of what a user states, such as NumPy's numbers, to the plain types that a recording holds."""

from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor

get_hints = cache(get_type_hints)
TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}


def adopt_types(instance: Any, prefix: str) -> None:
    """Convert the fields of a frozen dataclass to the plain types that they are annotated with.

    Numbers and arrays of NumPy and PyTorch become numbers and tuples. Lists, and single values where several are annotated,
    become tuples. Raises ValueError for other values of a wrong type; the message names the field after `prefix`.
    """
    cls: Any = type(instance)
    hints = get_hints(cls)
    for field in fields(instance):
        object.__setattr__(instance, field.name, _adopt(prefix + field.name, getattr(instance, field.name), hints[field.name]))


def _adopt(where: str, value: Any, hint: Any) -> Any:
    kind, inner = get_origin(hint), get_args(hint)
    if isinstance(value, np.generic | np.ndarray | Tensor):
        value = value.tolist()
    if kind is UnionType:  # always with None
        return None if value is None else _adopt(where, value, inner[0])
    if kind is tuple:
        items = value if isinstance(value, list | tuple) else (value,)
        return tuple(_adopt(where, item, inner[0]) for item in items)
    expected = str if kind is Literal else hint
    is_number = expected in (int, float) and isinstance(value, bool | str)
    if is_number or not isinstance(value, (int, float) if expected is float else expected):
        raise ValueError(f"{where} must be {TYPE_NAMES.get(expected, expected.__name__)}, got {value!r}")
    return value
