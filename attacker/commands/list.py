"""Command `attacker list`."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedsim.commands.console import Json, err, out, print_json


class ListedKind(StrEnum):
    """Kinds of components that `attacker list` can list."""

    ATTACKS = "attacks"
    DECODERS = "decoders"
    ENHANCERS = "enhancers"


def list_(
    kind: Annotated[
        ListedKind,
        typer.Argument(help="What to list: attacks, decoders or enhancers. The last two are values of arguments of attacks."),
    ] = ListedKind.ATTACKS,
    as_json: Json = False,
) -> None:
    """List the attacks with their arguments, presets, conditions of use and source, or the decoders or enhancers."""
    if kind is ListedKind.ATTACKS:
        _list_attacks(as_json)
    else:
        _list_parts(kind, as_json)


def _list_parts(kind: ListedKind, as_json: bool) -> None:
    """Print the name and the summary of each decoder or enhancer."""
    from attacker.attacks.learned.enhancer import ENHANCERS
    from attacker.attacks.matching.names import DECODERS
    from defenses.registry import Registry, read_summary

    known: Registry[Any] = DECODERS if kind is ListedKind.DECODERS else ENHANCERS
    summaries = {name: read_summary(known[name]) for name in known}
    if as_json:
        print_json(summaries)
        return
    for name, description in summaries.items():
        out.print(f"[bold]{escape(name)}[/]  {escape(description)}")


def _list_attacks(as_json: bool) -> None:
    import inspect

    from attacker.attacks import ATTACKS, presets
    from attacker.attacks.registry import explain_unusable
    from defenses.registry import read_summary

    attacks: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": read_summary(ATTACKS[name]),
            "arguments": {p.name: p.default for p in inspect.signature(ATTACKS[name]).parameters.values()},
            "presets": presets.get_settings(name),
            "needs": sorted(need.name.lower() for need in ATTACKS[name]().needs),
        }
        for name in ATTACKS
        if not explain_unusable(name)
    ]
    for reason in filter(None, map(explain_unusable, ATTACKS)):
        err.print(f"[bold yellow]left out[/]: {escape(reason)}")
    if as_json:
        print_json(attacks)
        return
    for attack in attacks:
        arguments = ", ".join(f"{key}={value!r}" for key, value in attack["arguments"].items())
        out.print(f"[bold]{attack['name']}[/]  {escape(attack['summary'])}")
        out.print(f"    arguments  {escape(arguments)}", style="dim")
        out.print(f"    needs      {', '.join(attack['needs'])}", style="dim")
        for name, settings in attack["presets"].items():
            if settings:
                out.print(f"    {name:<9}  {escape(_format_settings(settings))}", style="dim")


def _format_settings(settings: Mapping[str, Any]) -> str:
    """Return a preset's settings as text, `argument=value`, in groups if `settings` maps families of networks to settings."""
    families = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    if families:
        return "; ".join(f"{family}: {_format_settings(settings)}" for family, settings in families.items())
    return ", ".join(f"{key}={value!r}" for key, value in settings.items())
