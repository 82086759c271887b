"""Parser of specifications such as `"clip(4) | gaussian(0.1)"`: calls joined by `|`. The text is parsed and not evaluated."""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from defenses.registry import references
from defenses.registry.registry import bind_arguments

Factory = Callable[..., Any]
Value = Any
"""A number, a string, a bool, a tuple of these, or a specification within a specification."""

PAPER_NAMES = re.compile(r"(?<!['\"])\b([GL]-10e-\d+)\b(?!['\"])")
"""CPL's names for noise (table 8) outside of quotes: `G-10e-2` is an abbreviation of `cpl_noise('G-10e-2')`."""


@dataclass(frozen=True)
class Step:
    """One call of a specification. arguments: pairs of parameter name and value; parameters that were left out are absent."""

    name: str
    arguments: tuple[tuple[str, Value], ...] = ()

    def to_text(self, factory: Factory) -> str:
        """Return the step as text, such as "clip(4)", which `parse` can read.

        The arguments of required positional parameters, and of the first positional parameter, are written without their names;
        all other arguments as name=value. factory: function whose parameters the arguments belong to.
        """
        parameters = inspect.signature(factory).parameters
        free = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        by_position = {p.name for i, p in enumerate(free) if i == 0 or p.default is p.empty}
        shown = [_format_value(value) if key in by_position else f"{key}={_format_value(value)}" for key, value in self.arguments]
        return f"{self.name}({', '.join(shown)})"


def parse(
    text: str,
    factory_of: Callable[[str], Factory],
    kind: str,
    *,
    fill: Mapping[str, Value] | None = None,
    nested: Callable[[tuple[Step, ...]], Value] | None = None,
) -> tuple[Step, ...]:
    """Parse `text` into steps; an empty text gives none. CPL's names for noise, such as G-10e-2, stand for cpl_noise('G-10e-2').

    factory_of: maps a name to the function that takes its arguments; raises ValueError if the name is unknown.
    kind:       what is parsed, for error messages: "defense", for example.
    fill:       dict from a parameter to its value, used for required parameters that the text leaves out.
    nested:     maps the steps of a specification within an argument, such as clip(1) in masked(clip(1), ['6.*']), to the
                argument's value. None refuses such arguments.
    Arguments are numbers, strings, True, False, or lists of these. Raises ValueError for a text of another form, and for
    arguments that are unknown, missing, given twice or of the wrong type.
    """
    if not text.strip():
        return ()
    masked, names = references.mask_references(PAPER_NAMES.sub(r"cpl_noise('\1')", text.strip()))
    reader = _Reader(text, factory_of, kind, fill or {}, nested, names)
    try:
        return reader.read_steps(ast.parse(masked, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"cannot read {kind} {text!r}: write it as NAME(ARGUMENTS), and close every bracket and quote") from None


@dataclass(frozen=True)
class _Reader:
    text: str
    factory_of: Callable[[str], Factory]
    what: str
    fill: Mapping[str, Value]
    nested: Callable[[tuple[Step, ...]], Value] | None
    names: Mapping[str, str]

    def read_steps(self, node: ast.expr) -> tuple[Step, ...]:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return (*self.read_steps(node.left), *self.read_steps(node.right))
        return (self._read_step(node),)

    def _read_step(self, node: ast.expr) -> Step:
        if isinstance(node, ast.Name):
            node = ast.Call(func=node, args=[], keywords=[])
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise ValueError(f"cannot read {ast.unparse(node)!r} in {self.what} {self.text!r}: expected NAME(ARGUMENTS)")
        name = self.names.get(node.func.id, node.func.id)
        factory = self.factory_of(name)
        positional = [self._read_value(arg) for arg in node.args]
        named: dict[str, Value] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise ValueError(f"cannot read '**' in {self.what} {self.text!r}; write every argument out")
            if keyword.arg in named:
                raise ValueError(f"{name}: argument {keyword.arg!r} is given twice in {self.what} {self.text!r}")
            named[keyword.arg] = self._read_value(keyword.value)
        free = list(inspect.signature(factory).parameters.values())[len(positional) :]
        left = {p.name for p in free if p.default is inspect.Parameter.empty} - named.keys()
        named |= {key: self.fill[key] for key in left & self.fill.keys()}
        arguments = bind_arguments(name, factory, *positional, given=named)
        _check_types(name, factory, arguments)
        return Step(name, tuple(arguments.items()))

    def _read_value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name) and node.id.lower() in ("nan", "inf", "infinity"):
            raise ValueError(
                f"the {self.what} {self.text!r} has the argument {node.id}, which is not finite; give a finite number"
            )
        if self.nested is not None and _is_steps(node):
            return self.nested(self.read_steps(node))
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError):
            value = None
        value = tuple(value) if isinstance(value, list) else value
        if not all(isinstance(item, bool | int | float | str) for item in (value if isinstance(value, tuple) else (value,))):
            written, kinds = ast.unparse(node), "a number, a string, True or False, or a list of these"
            raise ValueError(f"argument {written!r} in {self.what} {self.text!r} must be {kinds}")
        return value


TYPE_NAMES = {bool: "True or False", float: "a number", int: "a whole number", str: "a text in quotes"}


def _check_types(name: str, factory: Factory, arguments: Mapping[str, Value]) -> None:
    """Raise ValueError if an argument has another type than its annotation: 'no' is not a bool, and True is not a number.

    Integers and floats are interchangeable here, so that functions that need whole numbers must check for them. Only parameters
    annotated as bool, int, float or str, or as one of these types or None, are checked.
    """
    parameters = inspect.signature(factory).parameters
    for key, value in arguments.items():
        annotation = parameters[key].annotation if key in parameters else None
        wanted = {kind for kind in (get_args(annotation) or (annotation,)) if kind is not type(None)}
        kind = wanted.pop() if len(wanted) == 1 else None
        if kind not in TYPE_NAMES:
            continue
        allowed = (int, float) if kind in (int, float) else (kind,)
        if type(value) not in allowed:
            raise ValueError(f"{name}: {key} must be {TYPE_NAMES[kind]}, got {_format_value(value)}")


def _is_steps(node: ast.expr) -> bool:
    return isinstance(node, ast.Call | ast.Name) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr))


def _format_value(value: Value) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(repr, value))}]"
    return repr(value) if isinstance(value, bool | int | float | str) else str(value)
