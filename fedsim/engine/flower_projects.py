"""Execution of a user's own Flower app in this process. The app records itself, and `attacker audit` attacks that recording."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.common.config import flatten_dict

from fedsim.engine.engines import EngineError, LocalGrid, set_verbosity
from fedsim.recording.safe_files import name_errors

PROJECT_FILE = "pyproject.toml"
RECORDED_KEY = "recorded"
"""Key of the app's configuration that names the folder of the run, as templates of `fedsim init` have it."""


def find_recorded(folder: Path) -> Path:
    """Return the folder that the Flower app in `folder` records to: `folder` joined with the key "recorded" of its configuration.

    Raises ValueError, with advice, if [tool.flwr.app.config] in the app's pyproject.toml has no such key with a text. Raises
    FileNotFoundError if there is no pyproject.toml, and ValueError if that file describes no Flower app.
    """
    config = _read_app(folder).get("config", {})
    if not isinstance(config.get(RECORDED_KEY), str):
        raise ValueError(
            f"{folder / PROJECT_FILE}: the table [tool.flwr.app.config] lacks the key `{RECORDED_KEY}`, the folder that the app "
            "records to; add it, or run the app with `flwr run` and pass the folder that it recorded to `attacker audit`"
        )
    return folder / str(config[RECORDED_KEY])


def run_project(folder: Path, clients: int) -> None:
    """Run the Flower app in `folder` with `clients` clients, one after the other, until it ends.

    The app's code is imported, for which the folder is put first in `sys.path` and stays there.
    Raises FileNotFoundError if the folder has no pyproject.toml, ValueError if that file names no Flower app or the app cannot be
    imported, and EngineError if the app fails while it runs.
    """
    app = _read_app(folder)
    set_verbosity(False)
    if str(folder.absolute()) not in sys.path:
        sys.path.insert(0, str(folder.absolute()))
    server, client = (_import_component(folder, app, key) for key in ("serverapp", "clientapp"))
    config = flatten_dict(app.get("config"))
    grid = LocalGrid(client, clients, config)
    try:
        server(grid, Context(run_id=grid.run.run_id, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    except Exception as error:  # an app may fail in any way
        raise EngineError(f"the app in {folder} failed: {type(error).__name__}: {error}") from error


def _read_app(folder: Path) -> dict[str, Any]:
    path = folder / PROJECT_FILE
    with name_errors(path):
        found = tomllib.loads(path.read_text()).get("tool", {}).get("flwr", {}).get("app", {})
    if not isinstance(found.get("components"), dict):
        raise ValueError(f"{path} does not describe a Flower app: it has no table [tool.flwr.app.components]")
    return dict(found)


def _import_component(folder: Path, app: dict[str, Any], key: str) -> Any:
    module, _, name = str(app["components"].get(key, "")).partition(":")
    if not module or not name:
        raise ValueError(f"{folder / PROJECT_FILE}: [tool.flwr.app.components] names no {key} as module:object")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # an import may fail in any way, too
        raise ValueError(f"{folder / PROJECT_FILE}: {key} {module}:{name} cannot be imported: {error}") from error
