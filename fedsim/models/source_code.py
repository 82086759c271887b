"""Identification of code from outside this project, such as a user's network or attack, and the files that it consists of."""

import ast
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

OWN_PACKAGES = frozenset({"attacker", "defenses", "fedleak", "fedsim"})
"""Packages of this project; the version of the project identifies their code."""
_INSTALLED = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SITE_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Names of folders of installed packages, of which a process may have several: also its user's, or that of a Flower app."""


def identify_code(function: Callable[..., Any]) -> str:
    """Return `module:name@digest` of a function or class from outside this project; "" for one of this project.

    The digest, 16 hexadecimal digits, covers the files of its module and of the loaded modules that this module uses, directly or
    indirectly, if they belong to the same package or lie outside Python's folders of installed packages. Modules of this project
    are not covered. Nor is the code of a function typed at a prompt, since its module has no file. If `inspect` finds no module
    for the function, `?:name@` is returned, without a digest.
    """
    module = inspect.getmodule(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if module is None:
        return f"?:{name}@"
    if module.__name__.partition(".")[0] in OWN_PACKAGES:
        return ""
    digest = hashlib.sha256()
    for path in sorted({path for used in _find_used_modules(module) if (path := _find_source_file(used)) is not None}):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{module.__name__}:{name}@{digest.hexdigest()[:16]}"


def find_code_to_ship(modules: Iterable[ModuleType]) -> list[Path]:
    """Return the paths, sorted, of package folders and single files that another machine needs to import a user's `modules`.

    The paths are those of `modules` and of the loaded modules that these use, directly or indirectly. Two kinds are left out,
    which the other machine must have: modules in Python's folders of installed packages, and modules of this project, unless
    they are among `modules`.
    """
    found = set[Path]()
    for module in {used for start in modules for used in _find_used_modules(start)}:
        path = _find_source_file(module)
        if path is None or _is_installed(path):
            continue
        package = sys.modules.get(module.__name__.partition(".")[0])
        folders = [Path(folder) for folder in getattr(package, "__path__", ())]
        found.add(next((folder.resolve() for folder in folders if path.is_relative_to(folder.resolve())), path))
    return sorted(found)


def _find_used_modules(start: ModuleType) -> Iterator[ModuleType]:
    """Yield `start` and the loaded modules that it uses, directly or indirectly, found by their globals and import statements.

    Besides `start`, only modules of its top-level package, and modules outside Python's folders of installed packages, such as a
    user's files, are yielded and searched. Modules of this project are not.
    """
    package = start.__name__.partition(".")[0]
    seen, waiting = {start.__name__}, [start]
    while waiting:
        module = waiting.pop()
        yield module
        values = list(vars(module).values())
        names = [value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) for value in values]
        for name in [*names, *_find_imported_names(module)]:
            if not isinstance(name, str) or name in seen or (other := sys.modules.get(name)) is None:
                continue
            seen.add(name)
            if _is_followed(other, package):
                waiting.append(other)


def _find_imported_names(module: ModuleType) -> Iterator[str]:
    """Yield the names in a module's import statements that may be modules: `a` and `a.b` for `from a import b`.

    An imported value such as a number has no `__module__`, so that the globals do not show from which module it comes. A module
    without a Python file that can be parsed yields no names.
    """
    path = _find_source_file(module)
    if path is None or path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # edited since it was imported
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = (module.__package__ or "").split(".")
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join(filter(None, (*above, node.module)))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _is_followed(module: ModuleType, package: str) -> bool:
    top = module.__name__.partition(".")[0]
    if top in OWN_PACKAGES:
        return False
    path = _find_source_file(module)
    return top == package or (path is not None and not _is_installed(path))


def _is_installed(path: Path) -> bool:
    return not _SITE_FOLDERS.isdisjoint(path.parts) or any(path.is_relative_to(folder) for folder in _INSTALLED)


def _find_source_file(module: ModuleType) -> Path | None:
    """Return the path of the file, source or compiled, that a module was loaded from; None if there is none."""
    named = getattr(module, "__file__", None)
    path = Path(named).resolve() if isinstance(named, str) else None
    return path if path is not None and path.is_file() else None
