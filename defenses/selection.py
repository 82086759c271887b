"""Defenses that act on tensors selected by name."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Generator, Tensor

from defenses.base import Defense, State, Update


def check_patterns(defense: str, names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the patterns as a tuple. Raises ValueError, naming the defense `defense`, if a pattern is not a string.

    names: one pattern, or a sequence of patterns.
    """
    patterns = (names,) if isinstance(names, str) else tuple(names)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(
                f"{defense}: each entry of the argument `names` must be a string, a tensor's name or a pattern such as '6.*', "
                f"got {pattern!r}"
            )
    return patterns


def choose_names(defense: str, patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return those of `names` that equal or match one of `patterns`, in the order of `names`.

    Raises ValueError, naming the defense `defense`, for a pattern without a match, so that a typing error cannot leave a tensor
    unprotected.
    """
    there = list(names)
    for pattern in patterns:
        if not any(_is_match(name, pattern) for name in there):
            shown = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "")
            raise ValueError(f"{defense}: no tensor's name matches {pattern!r}; there are {shown}")
    return [name for name in there if any(_is_match(name, pattern) for pattern in patterns)]


def _is_match(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def withhold(names: str | Sequence[str]) -> Defense:
    """Do not send some tensors; they arrive as zeros.

    Returns this defense, a `Defense`.
    names: names of parameters, or patterns with `*`, `?` and `[...]`: "6.*", "*.bias". `*` matches any text, also dots. A pattern
           that matches no parameter raises ValueError in `Defense.init`, before the defense is first applied.
    """
    patterns = check_patterns("withhold", names)

    def init(template: Update) -> State:
        choose_names("withhold", patterns, template)
        return {}

    def apply(update: Update, state: State, rng: Generator) -> tuple[Update, State]:
        withheld = set(choose_names("withhold", patterns, update))
        return {name: t.new_zeros(t.shape) if name in withheld else t.clone() for name, t in update.items()}, state

    return Defense(init, apply)


def masked(defense: Defense, names: str | Sequence[str]) -> Defense:
    """Apply a defense to some tensors only; the others are sent unchanged.

    Returns this defense, a `Defense`.
    defense: defense of the selected tensors, which this defense gets as one update. In masked(clip(1) | gaussian(0.1), ["6.*"]),
             `clip` limits the norm of all tensors together whose names begin with "6.".
    names:   names of parameters, or patterns as for `withhold`; at least one.
    """
    if not isinstance(defense, Defense):
        raise ValueError(f"masked: the first argument must be a defense, as in masked(clip(1), ['6.*']), got {defense!r}")
    patterns = check_patterns("masked", names)
    if not patterns:
        raise ValueError("masked: names must have at least one name or pattern, got none")

    def init(template: Update) -> State:
        return defense.init(select_tensors(template))

    def apply(update: Update, state: State, rng: Generator) -> tuple[Update, State]:
        acted_on, after = defense.apply(select_tensors(update), state, rng)
        return {name: acted_on[name] if name in acted_on else t.clone() for name, t in update.items()}, after

    def select_tensors(update: Update) -> dict[str, Tensor]:
        return {name: update[name] for name in choose_names("masked", patterns, update)}

    return Defense(init, apply)
