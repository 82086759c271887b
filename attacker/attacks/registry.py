"""The registry of attacks (names with the functions that build them), and `AttackSpec`, an attack's name with its arguments."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from math import isfinite
from typing import Any

from attacker.attacks.base import Attack, check_members
from attacker.attacks.learned.inversion import learning_to_invert
from attacker.attacks.membership.attack import membership
from attacker.attacks.multi_round.spans.attack import spans
from attacker.attacks.multi_round.spans.cohort_attack import cohort_spans
from attacker.attacks.nulls import BlindedNull
from attacker.attacks.papers.accumulate import accumulate
from attacker.attacks.papers.agic import agic
from attacker.attacks.papers.closed_form import cocktail_party, exact, hgap, rgap, robbing_the_fed
from attacker.attacks.papers.feature_reconstruction import feature_reconstruction
from attacker.attacks.papers.matching import cpl, dlg, idlg, inverting_gradients
from attacker.attacks.papers.rog import rog
from defenses.registry import Registry, bind_arguments

ATTACKS: Registry[Callable[..., Attack]] = Registry(
    "attacker.attacks",
    {
        "accumulate": accumulate,
        "agic": agic,
        "cocktail_party": cocktail_party,
        "cohort_spans": cohort_spans,
        "cpl": cpl,
        "dlg": dlg,
        "exact": exact,
        "feature_reconstruction": feature_reconstruction,
        "hgap": hgap,
        "idlg": idlg,
        "inverting_gradients": inverting_gradients,
        "learning_to_invert": learning_to_invert,
        "membership": membership,
        "rgap": rgap,
        "robbing_the_fed": robbing_the_fed,
        "rog": rog,
        "spans": spans,
    },
)

NULL_SUFFIX = " without gradient"
"""End of the text of an `AttackSpec` of a null."""


def explain_unusable(name: str) -> str:
    """Return the error message if building the attack `name` with default arguments, or reading its needs, fails; "" otherwise.

    Lists of attacks use it, so that an attack of a broken third-party package does not hide the others.
    """
    try:
        _ = ATTACKS[name]().needs
    except Exception as error:  # a user's attack may fail in any way
        return str(error) if isinstance(error, ValueError) else f"{name}: {type(error).__name__}: {error}"
    return ""


@dataclass(frozen=True, kw_only=True)
class AttackSpec:
    """The specification of an attack: its registered name and arguments.

    null: whether it stands for the attack's null, the same attack without what the clients sent.
    Raises ValueError for an unknown name or argument, for an argument of the wrong type or range or that the attack refuses, and
    for an attack without the members of `Attack` (`check_members`).
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    null: bool = False

    def __post_init__(self) -> None:
        bind_arguments(self.name, ATTACKS[self.name], given=self.arguments)
        parameters = signature(ATTACKS[self.name]).parameters
        for key, value in self.arguments.items():
            _check_value(f"{self.name}: {key}", value, parameters[key].default)
        check_members(self.name, ATTACKS[self.name](**self.arguments))

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in sorted(self.arguments.items()))
        return f"{self.name}({shown})" + (NULL_SUFFIX if self.null else "")

    @property
    def knows_defense(self) -> bool:
        """Return whether the attack models the clients' defense; false for an attack without a parameter `knows_defense`."""
        return bool(self.get_argument("knows_defense"))

    def get_argument(self, name: str) -> Any:
        """Return the value of an argument, or its default if it was not given; None if the attack has no such argument."""
        parameter = signature(ATTACKS[self.name]).parameters.get(name)
        return self.arguments.get(name, parameter.default) if parameter else None

    def build(self, *, device: str = "cpu") -> Attack:
        """Return the attack on `device`, or its null, which sees of the clients' messages only numbers of examples."""
        attack = ATTACKS[self.name](**self.arguments)
        attack.device = device
        return BlindedNull(attack.null()) if self.null else attack


def parse_arguments(spec: str) -> dict[str, Any]:
    """Return the arguments in the text of an `AttackSpec`, also of an unregistered attack; {} if the text cannot be parsed."""
    try:
        call = ast.parse(spec.removesuffix(NULL_SUFFIX), mode="eval").body
        return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords} if isinstance(call, ast.Call) else {}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}


def _check_value(title: str, value: Any, default: Any) -> None:
    """Raise ValueError unless `value` suits the type of `default`.

    For a bool, it must be a bool; for an integer, a positive integer; for a float, a finite number that is not negative;
    otherwise of the type of `default`. title: the attack and argument, for the message.
    """
    if isinstance(default, bool):
        good, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        good, expected = isinstance(value, int) and not isinstance(value, bool) and value > 0, "a whole number above 0"
    elif isinstance(default, float):
        good = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
        expected = "a number that is not negative"
    else:
        good, expected = isinstance(value, type(default)), "a text"
    if not good:
        raise ValueError(f"{title} must be {expected}, got {value!r}")
