"""Marks for the type hints of attack arguments, and the rule that decides which arguments a job of the web service may set.

A job may set arguments that take numbers, booleans or None, and those texts that the attack declares with `OneOf` or `Literal`.
Any other text could name a file, a module or an address that the worker would then open, so jobs may not set it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

SCALAR_TYPES = (bool, int, float, NoneType)


@dataclass(frozen=True)
class OneOf:
    """The allowed values of a text argument, as in `init: Annotated[str, OneOf(tuple(STARTS))]`."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class LocalFile:
    """Marker of a text argument that names a file on the machine that runs the attack; used through `FilePath`."""


FilePath = Annotated[str, LocalFile()]


@dataclass(frozen=True)
class AllowedValues:
    """The values that a job of the web service may give to one argument.

    words:  the allowed texts; empty if no text is allowed.
    scalar: whether numbers, booleans and None are allowed.
    """

    words: tuple[str, ...] = ()
    scalar: bool = True


def list_settable(factory: Callable[..., Any]) -> dict[str, AllowedValues]:
    """Return a dict from the name of each parameter that a job of the web service may set to the values allowed for it.

    factory: function or class that takes an attack's arguments and returns the attack.
    """
    hints, settable = _read_hints(factory), {}
    for parameter in signature(factory).parameters.values():
        if parameter.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            declared = _read_allowed_values(hints.get(parameter.name, type(parameter.default)))
            if declared is not None:
                settable[parameter.name] = declared
    return settable


def list_files(factory: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of an attack's factory that name a file."""
    hints = _read_hints(factory)
    return [name for name, hint in hints.items() if any(isinstance(mark, LocalFile) for mark in get_args(hint)[1:])]


def _read_hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints of a factory; none if they do not resolve, as may be in code of others."""
    try:
        function = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
        return get_type_hints(function, include_extras=True)
    except Exception:
        return {}


def _read_allowed_values(hint: Any) -> AllowedValues | None:
    """Return the values that a job may give to an argument with this type hint; None if a job may not set the argument."""
    origin = get_origin(hint)
    if any(hint is scalar for scalar in SCALAR_TYPES):
        return AllowedValues()
    if origin is Annotated:
        inner, *marks = get_args(hint)
        if any(isinstance(mark, LocalFile) for mark in marks):
            return None
        words = [mark.words for mark in marks if isinstance(mark, OneOf)]
        return AllowedValues(words[0], scalar=False) if inner is str and words else _read_allowed_values(inner)
    if origin is Literal:
        values = get_args(hint)
        return AllowedValues(tuple(v for v in values if isinstance(v, str)), scalar=any(type(v) in SCALAR_TYPES for v in values))
    if origin in (Union, UnionType):
        parts = [_read_allowed_values(part) for part in get_args(hint)]
        if all(part is not None for part in parts):
            known = [part for part in parts if part is not None]
            return AllowedValues(tuple(word for part in known for word in part.words), scalar=any(part.scalar for part in known))
    return None


def check_settable(name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if a job gives attack `name` an argument that jobs may not set, or a text that is not allowed for it.

    arguments: the job's arguments by name. Unknown names, and other types and ranges of values, are checked by `AttackSpec`.
    """
    allowed, parameters = list_settable(factory), signature(factory).parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    for key, value in arguments.items():
        if key not in parameters and not takes_any:
            continue  # `AttackSpec` reports unknown names
        if key not in allowed:
            raise ValueError(
                f"{name}: {key} cannot be set by a job, because it may name a file, a module or an address of the service's "
                f"machine; leave it out, or run attacker replay --attack {name} --set {key}=... on that machine"
            )
        declared = allowed[key]
        is_word = isinstance(value, str)
        if is_word and declared.words and value not in declared.words:
            allowed_words = ", ".join(declared.words) + ", or a number, true or false" * declared.scalar
            raise ValueError(f"{name}: a job of the web service cannot set {key} to {value!r}; choose one of {allowed_words}")
        if is_word and not declared.words:
            raise ValueError(f"{name}: {key} must be a number, true or false, got {value!r}")
