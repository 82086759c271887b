"""The specification of a defense is data: `"clip(4) | gaussian(0.1)"`, parsed, printed, and built from."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from defenses import channel as channels
from defenses.base import Defense, chain
from defenses.channel import Channel
from defenses.clipping import clip
from defenses.noise import gaussian
from defenses.registry import Registry, bind

Value = bool | int | float | str


class Kind(NamedTuple):
    """A defense by name: how a client builds it, and what an attacker who knows it does about it."""

    defense: Callable[..., Defense]
    channel: Callable[..., Channel]


DEFENSES: Registry[Kind] = Registry(
    "defenses",
    {
        "clip": Kind(clip, channels.clip),
        "gaussian": Kind(gaussian, channels.gaussian),
    },
)


@dataclass(frozen=True)
class Step:
    """One defense of a chain: its name and its arguments by parameter name."""

    name: str
    arguments: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        parameters = inspect.signature(DEFENSES[self.name].defense).parameters
        shown = [
            repr(value) if parameters[key].default is inspect.Parameter.empty else f"{key}={value!r}"
            for key, value in self.arguments
        ]
        return f"{self.name}({', '.join(shown)})"


@dataclass(frozen=True)
class DefenseSpec:
    """A chain of defenses as public data. The empty chain sends the update as it is."""

    steps: tuple[Step, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "DefenseSpec":
        """Read `text`: calls with literal arguments, joined by `|`, applied from left to right.

        Raises ValueError for anything else, and for unknown names and arguments, listing what exists.
        """
        if not text.strip():
            return cls()
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            spec = cls(tuple(_step(node, text) for node in _parts(tree)))
        except (SyntaxError, RecursionError):
            raise ValueError(f"cannot read defense {text!r}: write it as 'clip(4) | gaussian(0.1)'") from None
        try:
            spec.build()
        except TypeError as error:
            raise ValueError(f"defense {text!r}: an argument has the wrong type: {error}") from None
        return spec

    def __str__(self) -> str:
        return " | ".join(map(str, self.steps))

    def build(self) -> Defense:
        """The defense itself, for the client."""
        return chain(*(DEFENSES[step.name].defense(**dict(step.arguments)) for step in self.steps))

    def channel(self) -> Channel:
        """Its public part, for the attacker."""
        return channels.compose(*(DEFENSES[step.name].channel(**dict(step.arguments)) for step in self.steps))


def _parts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_parts(node.left), *_parts(node.right)]
    return [node]


def _step(node: ast.expr, text: str) -> Step:
    if isinstance(node, ast.Name):
        node = ast.Call(func=node, args=[], keywords=[])
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError(f"cannot read {ast.unparse(node)!r} in defense {text!r}: expected NAME(ARGUMENTS)")
    name = node.func.id
    positional = [_literal(arg, text) for arg in node.args]
    named: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError(f"cannot read '**' in defense {text!r}")
        if keyword.arg in named:
            raise ValueError(f"{name}: argument {keyword.arg!r} is given twice in defense {text!r}")
        named[keyword.arg] = _literal(keyword.value, text)
    return Step(name, tuple(bind(name, DEFENSES[name].defense, *positional, given=named).items()))


def _literal(node: ast.expr, text: str) -> Value:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        value = None
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"argument {ast.unparse(node)!r} in defense {text!r} is not a number, a string or a truth value")
    return value
