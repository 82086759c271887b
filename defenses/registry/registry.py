"""Registries: dicts of named objects that are built in, from entry points of packages, or code admitted as `module:function`."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

from defenses.registry import references

T = TypeVar("T")
_SETTINGS: dict[str, "Registry[Any]"] = {}
"""Registries whose names are values of a key of an experiment, by this key."""


class Registry(Generic[T]):
    """A mapping from names to objects: built in, from entry points, or code named `module:function` that the user admitted.

    Iteration gives the names of built-in objects and of entry points.
    group: entry point group through which installed packages add names. Built-in names take precedence.
    of:    required type of objects that are not built in; None accepts any callable.
    setting: key of an experiment whose names these are, which errors of other registries then name; "" if there is none.
    """

    def __init__(self, group: str, builtin: Mapping[str, T], *, of: type[T] | None = None, setting: str = "") -> None:
        self.group = group
        if setting:
            _SETTINGS[setting] = self
        self._of = of
        self._builtin = dict(builtin)

    def __getitem__(self, name: str) -> T:
        """Return the object called `name`.

        Raises ValueError if `name` is unknown, listing the known names, or if its object is not built in and cannot be imported
        or has the wrong type. Raises NotAdmitted for a `module:function` that the user did not admit.
        """
        if name in self._builtin:
            return self._builtin[name]
        if references.is_reference(name):
            return self._check(references.load_admitted(name, self.group), f"{name} in {self.group}")
        for entry in entry_points(group=self.group, name=name):
            return self._load(entry)
        raise ValueError(
            f"unknown name {name!r} in the registry {self.group}.{_name_setting(name) or suggest_name(name, self)} Known: "
            f"{', '.join(sorted(self))}"
        )

    def is_builtin(self, name: str) -> bool:
        """Return whether `name` is built in, as opposed to the name of an entry point or admitted code."""
        return name in self._builtin

    def _load(self, entry: EntryPoint) -> T:
        where = f"the entry point {entry.name} = {entry.value!r} of {self.group}"
        try:
            loaded = entry.load()
        except Exception as error:  # code outside this project may raise anything
            raise ValueError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
        return self._check(loaded, where)

    def _check(self, loaded: Any, source: str) -> T:
        """Return `loaded` if it has this registry's type; else raise ValueError. source: source of `loaded`, for messages."""
        if not (callable(loaded) if self._of is None else isinstance(loaded, self._of)):
            wanted = "something that can be called" if self._of is None else f"a {self._of.__module__}.{self._of.__name__}"
            raise ValueError(f"{source} must be {wanted}, got {type(loaded).__name__}")
        found: T = loaded
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._builtin, *(entry.name for entry in entry_points(group=self.group))}))


def _name_setting(name: str) -> str:
    """Return a sentence, beginning with a space, on the key of an experiment that takes the built-in `name`; "" if none does."""
    key = next((key for key, registry in _SETTINGS.items() if registry.is_builtin(name)), "")
    return f" It is a name for the key {key!r} of an experiment." if key else ""


def bind_arguments(
    name: str, function: Callable[..., Any], *args: Any, given: Mapping[str, Any] | None = None, hidden: int = 0
) -> dict[str, Any]:
    """Return positional and named arguments of `function` as one dict by parameter name; parameters not given are absent.

    args, given: the positional and the named arguments.
    hidden: number of leading parameters that the program passes itself, in `args`; the list of parameters in messages omits them.

    Raises ValueError, stating `name` and the parameters, if an argument is unknown, missing or given twice.
    """
    signature = inspect.signature(function)
    try:
        return dict(signature.bind(*args, **(given or {})).arguments)
    except TypeError as error:
        own = [p for p in signature.parameters.values() if p.name != "self"]
        parameters = ", ".join(str(p.replace(annotation=_strip_metadata(p.annotation))) for p in own[hidden:])
        names = [p.name for p in own[hidden:]]
        unknown = next((key for key in given or {} if key not in signature.parameters), "")
        raise ValueError(f"{name}: {error}.{suggest_name(unknown, names)} Its parameters: ({parameters})") from None


def _strip_metadata(annotation: Any) -> Any:
    """Return the type in `Annotated[type, ...]`; any other annotation unchanged."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'NAME'?", beginning with a space, for the known name most similar to `name`; "" if none is."""
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def read_source(documented: Any) -> str:
    """Return the source that the docstring of `documented` cites, or "": the text after "Source:" to the end of its paragraph.

    This text is joined into one line, without a full stop at its end.
    """
    _, marked, rest = (inspect.getdoc(documented) or "").partition("Source: ")
    return " ".join(rest.partition("\n\n")[0].split()).removesuffix(".") if marked else ""


def read_summary(documented: Any) -> str:
    """Return the first line of the docstring of `documented`; "" without a docstring."""
    return (inspect.getdoc(documented) or "").split("\n", 1)[0]
