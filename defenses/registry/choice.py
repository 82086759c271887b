"""Specifications with at most one name: values of the keys `gradient`, `network` and `inputs` of an experiment."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from defenses.registry import calls
from defenses.registry.calls import Step
from defenses.registry.registry import Registry


@dataclass(frozen=True)
class Choice:
    """A specification with at most one name and its arguments. Each subclass belongs to one key of an experiment.

    registry: names that the key accepts. what: the key, for error messages.
    nothing:  text that, like an empty text, means that nothing is chosen, such as "plain" for the key `gradient`.
    step:     the name and its arguments; None if nothing is chosen.
    """

    registry: ClassVar[Registry[Callable[..., Any]]]
    what: ClassVar[str]
    nothing: ClassVar[str] = ""

    step: Step | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse one name with its arguments. An empty text, or the text `nothing`, chooses nothing.

        Raises ValueError for a text of another form, an unknown name, and arguments that are unknown, of the wrong type or out of
        range.
        """
        if text.strip() in ("", cls.nothing):
            return cls()
        steps = calls.parse(text, cls._find_factory, cls.what)
        if len(steps) > 1:
            raise ValueError(f"{cls.what} {text!r} has {len(steps)} parts; give only one: {' or '.join(cls.registry)}")
        spec = cls() if steps[0] == Step(cls.nothing) else cls(steps[0])
        try:
            spec.check()
        except TypeError as error:
            raise ValueError(f"wrong type of argument in {cls.what} {text!r}: {error}") from error
        return spec

    def __str__(self) -> str:
        return self.nothing if self.step is None else self.step.to_text(self._find_factory(self.step.name))

    def check(self) -> None:
        """Raise the ValueError or TypeError of the registered function if it does not accept the arguments."""
        self.make()

    def make(self) -> Any:
        """Call the function that is registered under the name, with the arguments, and return its result.

        If nothing is chosen, the function registered under `nothing` is called; raises ValueError if there is none.
        """
        step = self.step or Step(self.nothing)
        return self.registry[step.name](**dict(step.arguments))

    @classmethod
    def _find_factory(cls, name: str) -> Callable[..., Any]:
        """Return a function whose parameters are the arguments that a specification with this name can set."""
        return cls.registry[name]
