"""Command `fedsim list`, which lists the names that an experiment can use, with their arguments.

The names are those of models, data sets, partitions, strategies, and four sorts of defenses: of updates, gradients, networks and
inputs.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedsim.commands.console import Json, out, print_json, report_errors

if TYPE_CHECKING:
    from defenses.registry import Registry

REGISTRY_KINDS = ("models", "datasets", "partitions", "strategies", "defenses", "gradients", "networks", "inputs")


def list_(
    kind: Annotated[
        str, typer.Argument(help="models, datasets, partitions, strategies, defenses, gradients, networks or inputs.")
    ],
    as_json: Json = False,
) -> None:
    """List the names that an experiment can use, with their arguments."""
    with report_errors():
        found = _describe_names(kind)
        if as_json:
            print_json(found)
            return
        for name, entry in found.items():
            out.print(f"[bold]{name:<14}[/] {escape(entry['summary'])}")
            for key in ("arguments", "reference"):
                if entry[key]:
                    out.print(f"    {key:<10} {escape(entry[key])}", style="dim")


def _describe_names(kind: str) -> dict[str, dict[str, Any]]:
    """Return a dict from each name of a `kind` to a dict of texts: "summary", "arguments" (with defaults) and "reference".

    The reference is the cited publication. kind: one of `REGISTRY_KINDS`, such as "models" or "defenses". Raises ValueError for
    any other `kind`.
    """
    if kind not in REGISTRY_KINDS:
        from defenses.registry import suggest_name

        raise ValueError(f"cannot list {kind!r}.{suggest_name(kind, REGISTRY_KINDS)} Known: {', '.join(REGISTRY_KINDS)}")
    if kind == "strategies":
        from fedsim.strategies import names as strategies

        return {name: {"summary": "Flower's own", "arguments": "", "reference": ""} for name in strategies.STRATEGY_NAMES}
    registry, factory_of = _find_registry(kind)
    return {name: _describe_or_explain(registry, name, factory_of) for name in registry}


def _describe_or_explain(registry: "Registry[Any]", name: str, factory_of: Callable[[Any], Callable[..., Any]]) -> dict[str, Any]:
    """Return the result of `_describe`, or why a name cannot be loaded, so that a broken package hides no others."""
    try:
        return _describe(factory_of(registry[name]))
    except ValueError as error:
        return {"summary": str(error), "arguments": "", "reference": ""}


def _find_registry(kind: str) -> "tuple[Registry[Any], Callable[[Any], Callable[..., Any]]]":
    """Return the registry of a kind of component, such as "models", and a function that maps its entries to their factories.

    kind: one of `REGISTRY_KINDS` except "strategies", which have no registry.
    """
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


def _describe(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return a dict of the summary, arguments and cited publication of a factory function, from its signature and docstring."""
    from defenses.registry import read_source, read_summary

    given = [p for p in inspect.signature(factory).parameters.values() if p.name not in HIDDEN_PARAMETERS]
    arguments = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in given)
    return {"summary": read_summary(factory), "arguments": arguments, "reference": read_source(factory)}


HIDDEN_PARAMETERS = ("shape", "num_classes", "examples", "clients", "rng", "model")
"""Parameters of factories that the program fills in, so that they are not listed."""
