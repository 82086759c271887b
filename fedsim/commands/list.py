"""`fedsim list`: what an experiment can name."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedsim.commands.console import Json, out, print_json, report_errors

if TYPE_CHECKING:
    from defenses._registry import Registry

KINDS = ("models", "datasets", "partitions", "strategies", "defenses", "gradients", "networks", "inputs")


def list_(
    kind: Annotated[
        str, typer.Argument(help="models, datasets, partitions, strategies, defenses, gradients, networks or inputs.")
    ],
    as_json: Json = False,
) -> None:
    """List what an experiment can name."""
    with report_errors():
        found = listed(kind)
        if as_json:
            print_json(found)
            return
        for name, told in found.items():
            out.print(f"[bold]{name:<14}[/] {escape(told['summary'])}")
            for key in ("arguments", "reference"):
                if told[key]:
                    out.print(f"    {key:<10} {escape(told[key])}", style="dim")


def listed(kind: str) -> dict[str, dict[str, Any]]:
    """By name: one line, the arguments with their defaults, and the reference. Raises ValueError for an unknown kind."""
    if kind not in KINDS:
        from defenses._registry import suggest

        raise ValueError(f"cannot list {kind!r}.{suggest(kind, KINDS)} Known: {', '.join(KINDS)}")
    if kind == "strategies":
        from fedsim.strategies import names as strategies

        return {name: {"summary": "Flower's own", "arguments": "", "reference": ""} for name in strategies.NAMES}
    registry, factory_of = _registry(kind)
    return {name: _told(registry, name, factory_of) for name in registry}


def _told(registry: "Registry[Any]", name: str, factory_of: Callable[[Any], Callable[..., Any]]) -> dict[str, Any]:
    """What a name stands for, or why it cannot be used: one broken package does not hide the rest."""
    try:
        return _described(factory_of(registry[name]))
    except ValueError as error:
        return {"summary": str(error), "arguments": "", "reference": ""}


def _registry(kind: str) -> "tuple[Registry[Any], Callable[[Any], Callable[..., Any]]]":
    from defenses.gradients import GRADIENTS
    from defenses.inputs import INPUTS
    from defenses.networks import NETWORKS
    from defenses.spec import DEFENSES
    from fedsim.data import DATASETS
    from fedsim.data.partition import PARTITIONS
    from fedsim.models import MODELS

    registries: dict[str, Registry[Any]] = {
        "models": MODELS,
        "datasets": DATASETS,
        "partitions": PARTITIONS,
        "defenses": DEFENSES,
        "gradients": GRADIENTS,
        "networks": NETWORKS,
        "inputs": INPUTS,
    }
    return registries[kind], (lambda thing: thing.defense) if kind == "defenses" else (lambda thing: thing)


def _described(factory: Callable[..., Any]) -> dict[str, Any]:
    from defenses._registry import reference, summary

    given = [p for p in inspect.signature(factory).parameters.values() if p.name not in HIDDEN]
    arguments = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given)
    return {"summary": summary(factory), "arguments": arguments, "reference": reference(factory)}


HIDDEN = ("shape", "num_classes", "examples", "clients", "rng", "model")
"""What a factory gets from the program."""
