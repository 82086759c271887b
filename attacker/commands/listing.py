"""attacker list."""

from typing import Any

from rich.markup import escape

from fedsim.console import Json, out, print_json


def list_(as_json: Json = False) -> None:
    """List the attacks, with their arguments, what each needs, and its source."""
    import inspect

    from attacker.attacks import ATTACKS
    from defenses.registry import summary

    found: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": summary(ATTACKS[name]),
            "arguments": {p.name: p.default for p in inspect.signature(ATTACKS[name]).parameters.values()},
            "needs": sorted(need.name.lower() for need in ATTACKS[name]().needs),
        }
        for name in ATTACKS
    ]
    if as_json:
        print_json(found)
        return
    for attack in found:
        arguments = ", ".join(f"{key}={value!r}" for key, value in attack["arguments"].items())
        out.print(f"[bold]{attack['name']}[/]  {escape(attack['summary'])}")
        out.print(f"    arguments  {escape(arguments)}", style="dim")
        out.print(f"    needs      {', '.join(attack['needs'])}", style="dim")
