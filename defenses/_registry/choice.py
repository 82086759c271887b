"""Specifications of one name with its arguments, or of nothing: the keys `gradient`, `network` and `inputs`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from defenses._registry import calls
from defenses._registry.calls import Step
from defenses._registry.registry import Registry


@dataclass(frozen=True)
class Choice:
    """What a key of an experiment names, as public data.

    A key has a registry, a word for it in errors, and a word for what nobody needs to ask for, with which it begins.
    """

    registry: ClassVar[Registry[Callable[..., Any]]]
    what: ClassVar[str]
    nothing: ClassVar[str] = ""

    step: Step | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `text`: one name with literal arguments, or none.

        Raises ValueError for anything else, and for unknown names and arguments, listing what exists.
        """
        if text.strip() in ("", cls.nothing):
            return cls()
        steps = calls.parse(text, cls._factory, cls.what)
        if len(steps) > 1:
            raise ValueError(f"{cls.what} {text!r} has {len(steps)} parts, and takes one: {' or '.join(cls.registry)}")
        spec = cls() if steps[0] == Step(cls.nothing) else cls(steps[0])
        try:
            spec.check()
        except TypeError as error:
            raise ValueError(f"wrong type of argument in {cls.what} {text!r}: {error}") from error
        return spec

    def __str__(self) -> str:
        return self.nothing if self.step is None else self.step.printed(self._factory(self.step.name))

    def check(self) -> None:
        """Raises ValueError or TypeError where the arguments are out of range."""
        self.made()

    def made(self) -> Any:
        """What the registry makes of the arguments."""
        step = self.step or Step(self.nothing)
        return self.registry[step.name](**dict(step.arguments))

    @classmethod
    def _factory(cls, name: str) -> Callable[..., Any]:
        """What the arguments are those of."""
        return cls.registry[name]
