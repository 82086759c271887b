"""Digests of the source code of other people's functions: which network, or which attack, a result is of."""

import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

OWN_PACKAGES = frozenset({"attacker", "defenses", "fedleak", "fedsim"})
"""Their code is part of this project, which says its version elsewhere."""
_INSTALLED = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def identify_code(function: Callable[..., Any]) -> str:
    """Return `module:name@digest` of a function or class that is not part of this project; "" for one that is.

    The digest is of the source files of its module and of all modules that this one uses, directly or not, as far as they are of
    the same package or are not installed: the network of an app changes with any of them. A function without a source file, for
    example one that was typed at a prompt, is identified by its name alone.
    """
    module = inspect.getmodule(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if module is None:
        return f"?:{name}@"
    if module.__name__.partition(".")[0] in OWN_PACKAGES:
        return ""
    digest = hashlib.sha256()
    for path in sorted({path for used in _used_modules(module) if (path := _source_file(used)) is not None}):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{module.__name__}:{name}@{digest.hexdigest()[:16]}"


def _used_modules(start: ModuleType) -> Iterator[ModuleType]:
    """`start` and the modules whose code it can reach through its globals."""
    package = start.__name__.partition(".")[0]
    seen, waiting = {start.__name__}, [start]
    while waiting:
        module = waiting.pop()
        yield module
        for value in list(vars(module).values()):
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if not isinstance(name, str) or name in seen or (other := sys.modules.get(name)) is None:
                continue
            seen.add(name)
            if _is_followed(other, package):
                waiting.append(other)


def _is_followed(module: ModuleType, package: str) -> bool:
    top = module.__name__.partition(".")[0]
    if top in OWN_PACKAGES:
        return False
    path = _source_file(module)
    return top == package or (path is not None and not any(path.is_relative_to(folder) for folder in _INSTALLED))


def _source_file(module: ModuleType) -> Path | None:
    """The file of a module's source, or of its compiled code where there is no source."""
    named = getattr(module, "__file__", None)
    path = Path(named).resolve() if isinstance(named, str) else None
    return path if path is not None and path.is_file() else None
