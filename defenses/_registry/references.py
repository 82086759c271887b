"""Code that is not part of this project, named as `module:function`.

It is imported only after the local user asked for it, on the command line or in Python. Manifests, recordings, a server's
settings and requests to the service name models and attacks as well: what they name is never imported because they name it.

What was admitted is kept in the environment variable `FEDLEAK_CODE`, so that worker processes which this one starts know it.
"""

import os
import re
import sys
from importlib import import_module
from operator import attrgetter
from typing import Any

VARIABLE = "FEDLEAK_CODE"
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
REFERENCE = re.compile(f"{_DOTTED}:{_DOTTED}")
_QUOTED_OR_REFERENCE = re.compile(rf"'[^']*'|\"[^\"]*\"|({REFERENCE.pattern})")


def is_reference(name: str) -> bool:
    """Return whether `name` is written as `module:function`."""
    return REFERENCE.fullmatch(name) is not None


def references_in(text: str) -> list[str]:
    """Return the references in a specification string; what is in quotes is an argument."""
    return [found for found in _QUOTED_OR_REFERENCE.findall(text) if found]


def mask(text: str) -> tuple[str, dict[str, str]]:
    """Return `text` with a Python name in place of each reference, and the references by that name."""
    names: dict[str, str] = {}

    def masked(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        name = f"_reference_{len(names)}"
        names[name] = match[1]
        return name

    return _QUOTED_OR_REFERENCE.sub(masked, text), names


def admit(reference: str) -> Any:
    """Import `module:function`, also from the current folder, and return it; registries accept it from now on.

    Call this only with what the local user wrote. Raises ValueError where there is no such thing.
    """
    if not is_reference(reference):
        raise ValueError(f"{reference!r} names no code; write module:function")
    found = _imported(reference)
    remember(reference)
    return found


def remember(*names: str) -> None:
    """Let registries import what was admitted in another process of the local user, once they are asked for it."""
    os.environ[VARIABLE] = ",".join(dict.fromkeys((*admitted(), *names)))


def admitted() -> tuple[str, ...]:
    """Return what was admitted in this process, or in the one that started it."""
    return tuple(filter(None, os.environ.get(VARIABLE, "").split(",")))


def is_admitted(reference: str) -> bool:
    """Return whether the local user asked for this code."""
    return reference in admitted()


def load(reference: str, group: str) -> Any:
    """Return admitted code, for the registry of `group`. Raises ValueError, with the mend, where nobody asked for it."""
    if not is_admitted(reference):
        raise ValueError(
            f"{reference!r} in {group} is code that is not part of this project, "
            f"which is only imported where asked for by name: put --code {reference} before the command"
        )
    return _imported(reference)


def _imported(reference: str) -> Any:
    module, _, path = reference.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return attrgetter(path)(import_module(module))
    except Exception as error:  # the code of others may fail in any way
        raise ValueError(f"cannot import {reference}: {type(error).__name__}: {error}") from error
