"""Import of code from outside this project, named as `module:function`.

Such code is imported only after the local user admitted it: on the command line, in Python, in the user's own experiment, or in
the settings of the user's own client. The same names in manifests, recordings, a server's settings or requests to the service
never cause an import by themselves.

Admitted names are stored in the environment variable `FEDLEAK_CODE`, which processes that this one starts inherit.
"""

import os
import re
import sys
from importlib import import_module
from operator import attrgetter
from typing import Any

CODE_VARIABLE = "FEDLEAK_CODE"
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
REFERENCE_PATTERN = re.compile(f"{_DOTTED}:{_DOTTED}")
_QUOTED_OR_REFERENCE = re.compile(rf"'[^']*'|\"[^\"]*\"|({REFERENCE_PATTERN.pattern})")


class NotAdmitted(ValueError):
    """Error for code that the local user has not allowed to be imported (admitted). reference: its name, `module:function`."""

    def __init__(self, message: str, *, reference: str) -> None:
        super().__init__(message)
        self.reference = reference


def is_reference(name: str) -> bool:
    """Return whether `name` has the form `module:function`. "npz:train", a data set with a path, has this form as well."""
    return REFERENCE_PATTERN.fullmatch(name) is not None


def find_references(text: str) -> list[str]:
    """Return the references `module:function` in a specification string, in their order; text in quotes is ignored."""
    return [found for found in _QUOTED_OR_REFERENCE.findall(text) if found]


def mask_references(text: str) -> tuple[str, dict[str, str]]:
    """Replace references outside of quotes by valid Python names; return the new text, and a dict from new name to reference."""
    names: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        name = f"_reference_{len(names)}"
        names[name] = match[1]
        return name

    return _QUOTED_OR_REFERENCE.sub(replace, text), names


def admit(reference: str) -> Any:
    """Import `module:function`, also from the current folder, and return it; from now on, registries may import it as well.

    Call this only with names that the local user gave. Raises ValueError if `reference` has another form or the import fails.
    """
    if not is_reference(reference):
        raise ValueError(f"{reference!r} is not a reference to Python code; write module:function")
    found = _import(reference)
    remember_admitted(reference)
    return found


def remember_admitted(*names: str) -> None:
    """Allow the code with these names, `module:function`, to be imported, such as after the user allowed it in another process.

    Nothing is imported yet. The names are stored in the environment variable `CODE_VARIABLE`, which child processes inherit.
    """
    os.environ[CODE_VARIABLE] = ",".join(dict.fromkeys((*list_admitted(), *names)))


def list_admitted() -> tuple[str, ...]:
    """Return the names `module:function` of the code that the user allowed to be imported, here or in the parent process."""
    return tuple(filter(None, os.environ.get(CODE_VARIABLE, "").split(",")))


def is_admitted(reference: str) -> bool:
    """Return whether the user allowed the code `reference`, `module:function`, to be imported, here or in the parent process."""
    return reference in list_admitted()


def load_admitted(reference: str, group: str) -> Any:
    """Import and return the object `reference`, `module:function`, if the user has allowed (admitted) it.

    Raises NotAdmitted if the user has not allowed it, and ValueError if the import fails.
    group: name of the registry that asks for the code, for messages.
    """
    if not is_admitted(reference):
        raise NotAdmitted(
            f"{reference!r} in {group} is code that is not part of this project, which is imported only if you ask for it: put "
            f"--code {reference} before the command, as in attacker --code {reference} score RUN, or call fedleak.load with "
            f"code=[{reference!r}]",
            reference=reference,
        )
    return _import(reference)


def _import(reference: str) -> Any:
    module, _, path = reference.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return attrgetter(path)(import_module(module))
    except Exception as error:  # code outside this project may raise anything
        unknown = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        mend = "; run the command in the folder with this module, or add the folder to PYTHONPATH" if unknown else ""
        raise ValueError(f"cannot import {reference}: {type(error).__name__}: {error}{mend}") from error
