"""Command `fedsim show`, which prints what was recorded, by round and by client."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedsim.commands.console import Json, out, print_json, report_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedsim.recording import Row

MAX_CLIENTS = 50
"""Largest number of clients that are listed on the terminal."""
EPSILON_TITLES = {
    "epsilon_client": "epsilon (client)",
    "epsilon_example": "epsilon (example)",
    "epsilon_central": "epsilon (global model)",
}


def show(folder: Annotated[Path, typer.Argument(help="Folder of a run.")], as_json: Json = False) -> None:
    """Show the settings of a run, what was recorded in each round, and the names of the clients."""
    with report_errors():
        result = describe_run(folder)
        if as_json:
            print_json(result)
            return
        for key in ("model", "data", "training", "defense", "gradient", "network", "inputs", "secure_aggregation", "created"):
            if key == "defense" or result[key] not in ("", "plain", False):
                value = _drop_defaults(result[key]) if key == "training" else result[key]
                out.print(f"[dim]{key.replace('_', ' '):>18}[/]  {escape(str(value) or 'none')}")
        spent = {key: title for key, title in EPSILON_TITLES.items() if any(_is_number(row[key]) for row in result["per_round"])}
        states = [key for key in ("complete", "masked", "failed", "late") if key != "masked" or result["secure_aggregation"]]
        heads = ("round", *states, "bytes up", "loss", "accuracy", *spent.values())
        table = Table(*heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for row in result["per_round"]:
            scores = [f"{row[key]:.3f}" if row.get(key) is not None else "" for key in ("loss", "accuracy")]
            scores += [f"{row[key]:.3g}" if _is_number(row[key]) else str(row[key] or "") for key in spent]
            table.add_row(*(str(row[key]) for key in ("round", *states, "bytes")), *scores)
        out.print(table)
        _print_clients(result["per_client"])


def _drop_defaults(training: dict[str, Any]) -> dict[str, Any]:
    """Return the training settings that differ from their defaults, by name."""
    from fedsim.recording import Training

    defaults = {field.name: field.default for field in fields(Training)}
    return {key: value for key, value in training.items() if value != defaults[key]}


def _print_clients(clients: list[dict[str, Any]]) -> None:
    """Print one line for each of the first `MAX_CLIENTS` clients: name, numbers of rounds and updates, and number of examples.

    clients: as `_summarise_clients` returns them. The number of examples is printed as the range over the client's updates.
    """
    table = Table("client", "rounds", "complete", "examples a round", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in clients[:MAX_CLIENTS]:
        least, most = row["num_examples"]
        examples = "not reported" if least is None else str(least) if least == most else f"{least}-{most}"
        table.add_row(escape(row["client"]), str(row["rounds"]), str(row["complete"]), examples)
    out.print(table)
    if len(clients) > MAX_CLIENTS:
        out.print(f"and {len(clients) - MAX_CLIENTS} more clients; --json lists all")


def _summarise_clients(rows: "Iterable[Row]") -> list[dict[str, Any]]:
    """Return one dict per client, sorted by name.

    client: name. rounds: number of recorded rounds in which the client was asked.
    complete: number of its updates in the recording, without those that are masked by secure aggregation.
    num_examples: smallest and largest number of distinct examples that one of its updates was trained on, see `Row.num_examples`;
    [None, None] if this number is known for no update.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.client, []).append(row)
    clients = []
    for client, client_rows in sorted(found.items()):
        reported = [row.num_examples for row in client_rows if row.num_examples is not None]
        complete = sum(row.status == "complete" for row in client_rows)
        span = [min(reported), max(reported)] if reported else [None, None]
        clients.append({"client": client, "rounds": len(client_rows), "complete": complete, "num_examples": span})
    return clients


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _read_measures(row: dict[str, Any]) -> dict[str, Any]:
    """Return a dict of loss, accuracy and privacy budgets from a round's row of metrics; None where a value is missing.

    epsilon_client, epsilon_example: epsilon of differential privacy for a client's whole data, or for one example; at most one of
    the two is known. epsilon_central: for an observer of the global model alone.
    """
    privacy = _to_mapping(row.get("privacy"))
    epsilons = {"client": None, "example": None, "central": _to_mapping(privacy.get("central")).get("epsilon")}
    if privacy.get("unit") in ("client", "example"):
        epsilons[privacy["unit"]] = privacy.get("epsilon")
    measured = {key: row[key] if _is_number(row.get(key)) else None for key in ("loss", "accuracy")}
    return measured | {f"epsilon_{about}": value for about, value in epsilons.items()}


def _to_mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def describe_run(folder: Path) -> dict[str, Any]:
    """Return settings, rounds, clients and size of a run as a dict of plain JSON values, which `fedsim show --json` prints.

    rounds: number of recorded rounds. clients: names. per_client: see `_summarise_clients`. megabytes: size of the recording.
    complete: number of recorded updates. With secure aggregation, the clients' masked updates do not count, and their sum in each
    round counts as one update.
    per_round: one dict per round, with the numbers of complete, failed, late and masked replies, the received bytes, and the
    loss, accuracy and privacy budgets of `_read_measures`.
    folder: a run, or a recording; its training metrics are then read from the folder above it.
    Raises ValueError if `folder` is neither, or a file that is read is a link, damaged or invalid.
    """
    from dataclasses import asdict

    from fedsim.recording import Recording, find_recording, find_run
    from fedsim.recording.files import read_json_lines
    from fedsim.recording.masked_vectors import SUM_CLIENT
    from fedsim.recording.run_check import check_run

    at, folder = find_recording(folder), find_run(folder)
    check_run(folder)
    recording = Recording(at)
    m, counts = recording.manifest, recording.count_replies()
    metrics = {row["round"]: row for row in read_json_lines(folder / "metrics.jsonl") if type(row.get("round")) is int}
    per_round = [asdict(count) | _read_measures(metrics.get(count.round, {})) for count in counts]
    return {
        "run": str(folder),
        "model": str(m.model),
        "network": m.network,
        "data": {"shape": list(m.data.shape), "num_classes": m.data.num_classes},
        "training": {key: value for key, value in asdict(m.training).items() if value is not None},
        "defense": str(m.defense),
        "gradient": m.gradient,
        "inputs": m.inputs,
        "secure_aggregation": m.secure_aggregation,
        "codec": m.codec,
        "created": m.created,
        "rounds": len(counts),
        "complete": sum(count.complete for count in counts),
        "clients": recording.list_clients(),
        "per_client": _summarise_clients(
            row for row in recording.read_rows(on_damage=lambda error: None) if row.client != SUM_CLIENT
        ),
        "megabytes": sum(path.stat().st_size for path in recording.folder.rglob("*") if path.is_file()) / 1e6,
        "per_round": per_round,
    }
