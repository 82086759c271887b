"""What `flwr run .` starts; its run config carries the experiment and the run's folder on the server.

experiment: path of a TOML file, read where the party runs, from this project as well. settings: the same as text, in its place.
out:        the run's folder on the server. Relative paths are read from the folder in which Flower's process was started.
public:     on the server, the folder of public facts on data that it does not have; empty where it has them.
resume, device, threads: as for `fedsim run`.

What is a client's own is in the configuration of its SuperNode, which no server sets: `data`, `private`, `truth` and `public`
(`fedsim.engine.locations`), `client-seed` for simulations that are to repeat, and `experiment`: a file that says what this
client agreed to; it takes no part in anything else.
"""

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context

from fedsim.config.experiment import Experiment, read, validate
from fedsim.engine.apps import client_app, server_app
from fedsim.engine.locations import Places
from fedsim.engine.run import FederationRun


def run_of_server(context: Context) -> FederationRun:
    """The run as the server knows it."""
    config = context.run_config
    public = str(config.get("public", ""))
    return _run(*_told(config), Places(public=Path(public) if public else None), None)


def run_of_client(context: Context) -> FederationRun:
    """The run as this client knows it. Raises ValueError where it is another one than the client agreed to."""
    own = context.node_config
    seed = own.get("client-seed")
    run = _run(*_told(context.run_config), _places(own), None if seed is None else int(seed))
    if "experiment" in own and read(Path(str(own["experiment"]))) != run.experiment:
        raise ValueError(f"the server asks for another experiment than this client agreed to in {own['experiment']}")
    return run


def _places(own: Any) -> Places:
    """A client's, out of its node config."""
    private, truth, public = (Path(str(own[key])).absolute() if key in own else None for key in ("private", "truth", "public"))
    return Places(data=str(own["data"]) if "data" in own else None, private=private, truth=truth, public=public)


def _told(config: Any) -> tuple[str, str, str, bool, str, int]:
    words = str(config["experiment"]), str(config.get("settings", "")), str(config["out"])
    return (*words, bool(config["resume"]), str(config.get("device", "auto")), int(config.get("threads", 1)))


@lru_cache(maxsize=4)
def _run(
    experiment: str, settings: str, out: str, resume: bool, device: str, threads: int, places: Places, seed: int | None
) -> FederationRun:
    run = FederationRun(
        experiment=_experiment(experiment, settings),
        out=Path(out).absolute(),
        resume=resume,
        device=device,
        threads=threads or None,
        client_seed=seed,
        places=places,
    )
    return run if places.private is not None or places.public is not None else run.settled()


def _experiment(path: str, settings: str) -> Experiment:
    if settings:
        return validate(tomllib.loads(settings), source="run config, settings")
    here = Path(path)
    return read(here if here.exists() else Path(__file__).parents[2] / path)


client = client_app(run_of_client)
server = server_app(run_of_server)
