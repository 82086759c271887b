"""Random changes of the files of a run: links, pipes and hard links; bytes; values in JSON, TOML, SQLite and tensor headers."""

import json
import os
import random
import shutil
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

STEERING = "\x1b[2J"
"""The control sequence that clears a terminal. Changed texts contain it, and no output of a command may."""
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, 10**400, 1e308, -0.5, float("nan"), float("inf")),
    *(
        "",
        "sum",
        "all",
        "../../outside/secret",
        "/etc/passwd",
        f"a{STEERING}",
        "\n",
        "x" * 100_000,
        "$(touch outside/x)",
        "\ud800",
    ),
    *([], {}, [[]], [None], ["a"], {"a": {}}, [1, 2, 3], [[1, 1]], "complete", "1e999", "NaN"),
)
Rng = random.Random


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())


def plant(rng: Rng, run: Path) -> str:
    """Put a link, a pipe, a socket, a folder or a hard link in place of a file or folder, or beside it."""
    path = rng.choice(sorted(run.rglob("*")))
    if rng.random() < 0.3:
        path = path.with_name(
            rng.choice((".lock", "lock", f".{path.name}.{os.getpid()}.partial", "a.checkpoint", "index.sqlite-journal"))
        )
    outside = run.parent / "outside"
    kind = rng.choice(
        ("link", "link to a folder", "link to nothing", "link to itself", "second name", "pipe", "socket", "folder")
    )
    if os.path.lexists(path):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    match kind:
        case "second name":
            os.link(outside / "secret", path)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            before = os.getcwd()
            os.chdir(path.parent)
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name[:90])
            os.chdir(before)
        case _:
            path.symlink_to(
                outside / {"link": "secret", "link to a folder": "folder"}.get(kind, "absent") if "itself" not in kind else path
            )
    return f"{kind} at {path.relative_to(run)}"


def remove(rng: Rng, run: Path) -> str:
    path = rng.choice(sorted(run.rglob("*")))
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return f"removed {path.relative_to(run)}"


def change_bytes(rng: Rng, run: Path) -> str:
    path = rng.choice(files_of(run))
    content = bytearray(path.read_bytes())
    kind = rng.choice(("flip", "overwrite", "cut", "insert", "truncate", "empty", "hollow", "junk", "twice"))
    at = rng.randrange(len(content) + 1)
    match kind:
        case "flip" if content:
            content[at % len(content)] ^= 1 << rng.randrange(8)
        case "overwrite":
            content[at : at + 8] = rng.randbytes(8)
        case "cut":
            del content[at : at + rng.randrange(1, 100)]
        case "insert":
            content[at:at] = rng.randbytes(rng.randrange(1, 100))
        case "truncate":
            del content[at:]
        case "empty":
            content.clear()
        case "junk":
            content = bytearray(rng.randbytes(1000))
        case "twice":
            content += bytes(content)
    path.write_bytes(content)
    if kind == "hollow":
        os.truncate(path, 2 ** rng.choice((24, 33, 40)))
    return f"{kind} in {path.relative_to(run)} at {at}"


def change_value(rng: Rng, value: Any) -> Any:
    """Return a copy of JSON with one value at any depth replaced, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: change_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return [*value[:at], *value[at + 1 :]] if rng.random() < 0.5 else [*value, value[at]]
        return [*value[:at], change_value(rng, value[at]), *value[at + 1 :]]
    return rng.choice(ODD)


def change_json(rng: Rng, run: Path) -> str:
    path = rng.choice([path for path in files_of(run) if path.suffix in (".json", ".jsonl")])
    try:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        at = rng.randrange(len(lines))
        lines[at] = "[" * 100_000 if rng.random() < 0.03 else json.dumps(change_value(rng, json.loads(lines[at])))
    except ValueError:  # an earlier change has made it invalid
        return ""
    path.write_bytes("\n".join([*lines, ""]).encode("utf-8", "surrogatepass"))
    return f"a value in {path.relative_to(run)}"


def change_tensors(rng: Rng, run: Path) -> str:
    """Change a value in the header of a tensor file, or in the facts that it contains."""
    found = [path for path in files_of(run) if path.suffix == ".safetensors"]
    path = rng.choice(found)
    content = path.read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        metadata = header.get("__metadata__", {})
        if "facts" in metadata and rng.random() < 0.7:
            metadata["facts"] = json.dumps(change_value(rng, json.loads(metadata["facts"])))
        else:
            header = change_value(rng, header)
        described = json.dumps(header).encode()
    except (ValueError, AttributeError, TypeError):
        return ""
    path.write_bytes(len(described).to_bytes(8, "little") + described + content[8 + length :])
    return f"the header of {path.relative_to(run)}"


def change_index(rng: Rng, run: Path) -> str:
    table = rng.choice(("rounds", "observations"))
    try:
        with closing(sqlite3.connect(run / "recording" / "index.sqlite", timeout=0.1)) as index, index:
            column = rng.choice([row[1] for row in index.execute(f"PRAGMA table_info({table})")])
            odd = rng.choice(
                [one for one in ODD if not isinstance(one, list | dict) and (type(one) is not int or abs(one) < 2**63)]
            )
            index.execute("PRAGMA ignore_check_constraints = ON")
            index.execute(f"UPDATE {table} SET {column} = ? WHERE round = {rng.choice((1, 2))}", (odd,))
    except (sqlite3.Error, IndexError, UnicodeEncodeError):
        return ""
    return f"{column} of {table}"


def change_toml(rng: Rng, run: Path) -> str:
    path = run / "experiment.toml"
    if not path.is_file() or path.is_symlink():
        return ""
    lines = path.read_text(errors="replace").splitlines() or [""]
    at = rng.randrange(len(lines))
    lines[at] = rng.choice(
        (lines[at].partition("=")[0] + "= 1e400", "a = [" + "[" * 5000, "", "rounds = 10000000000", '"\\u0000" = 1', "[[")
    )
    path.write_text("\n".join(lines))
    return f"line {at + 1} of experiment.toml"


CHANGES: tuple[tuple[Callable[[Rng, Path], str], int], ...] = (
    *((plant, 4), (remove, 1), (change_bytes, 3), (change_json, 5), (change_tensors, 3), (change_index, 2), (change_toml, 1)),
)
