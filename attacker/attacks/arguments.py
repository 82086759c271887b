"""Types of attack arguments, and which of them someone who does not own the machine may set.

Whoever submits a job to the service may give numbers, booleans and words that the attack declares. Anything else could name a
file, a module or an address that the worker would then open, so it is refused by default: an attack that is added later has to
declare its words, or its text arguments are for the command line alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

SCALARS = (bool, int, float, NoneType)


@dataclass(frozen=True)
class OneOf:
    """The words that a text argument may be: `init: Annotated[str, OneOf(tuple(STARTS))]`."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class LocalFile:
    """Marks a text argument that names a file of the machine that attacks: `FilePath`."""


FilePath = Annotated[str, LocalFile()]


@dataclass(frozen=True)
class Settable:
    """What an argument may be in a job. words: the known texts; without any, a number or a boolean."""

    words: tuple[str, ...] = ()
    scalar: bool = True


def settable(factory: Callable[..., Any]) -> dict[str, Settable]:
    """The parameters of an attack that a job may set, by name."""
    try:
        function = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
        hints = get_type_hints(function, include_extras=True)
    except Exception:  # annotations of a third party that do not resolve: its text arguments are not declared
        hints = {}
    found = {}
    for parameter in signature(factory).parameters.values():
        if parameter.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            declared = _declared(hints.get(parameter.name, type(parameter.default)))
            if declared is not None:
                found[parameter.name] = declared
    return found


def _declared(hint: Any) -> Settable | None:
    """None for a type that admits a text or an object that was not declared."""
    origin = get_origin(hint)
    if any(hint is scalar for scalar in SCALARS):
        return Settable()
    if origin is Annotated:
        inner, *marks = get_args(hint)
        if any(isinstance(mark, LocalFile) for mark in marks):
            return None
        words = [mark.words for mark in marks if isinstance(mark, OneOf)]
        return Settable(words[0], scalar=False) if inner is str and words else _declared(inner)
    if origin is Literal:
        values = get_args(hint)
        return Settable(tuple(v for v in values if isinstance(v, str)), scalar=any(type(v) in SCALARS for v in values))
    if origin in (Union, UnionType):
        parts = [_declared(part) for part in get_args(hint)]
        if all(part is not None for part in parts):
            known = [part for part in parts if part is not None]
            return Settable(tuple(word for part in known for word in part.words), scalar=any(part.scalar for part in known))
    return None


def check_settable(name: str, factory: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument of attack `name` that a job may not set, or a word that the attack does not declare."""
    allowed, parameters = settable(factory), signature(factory).parameters
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    for key, value in given.items():
        if key not in parameters and not takes_any:
            continue  # an unknown name, which `AttackSpec` explains
        if key not in allowed:
            raise ValueError(
                f"{name}: {key} cannot be set by a job, because it may name a file, a module or an address of the service's "
                f"machine; leave it out, or run attacker replay --attack {name} --set {key}=... there"
            )
        declared = allowed[key]
        is_word = isinstance(value, str)
        if is_word and declared.words and value not in declared.words:
            raise ValueError(f"{name}: unknown {key} {value!r}. Known: {', '.join(declared.words)}")
        if is_word and not declared.words:
            raise ValueError(f"{name}: {key} must be a number, true or false, got {value!r}")
