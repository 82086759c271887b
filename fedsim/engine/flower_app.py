"""The Flower apps that `flwr run .` starts.

Keys of the run config, which the server's side chooses:

experiment:              path of a TOML file, read on the machine of each party.
settings:                the content of a TOML file; unless empty, it is used instead of the file at `experiment`.
out:                     folder of the run on the server. Relative paths start in the folder of Flower's process.
public:                  on the server, folder of public facts about the data, if the server does not have the data; otherwise
                         empty.
resume, device, threads: as for `fedsim run`; 0 threads are PyTorch's default.

A client's settings are in the node config of its SuperNode, which no server can change: `data`, `private`, `truth` and `public`
(`fedsim.engine.locations`), `client-seed` for reproducible simulations, and `experiment`, the path of the experiment that this
client agreed to. If `experiment` is given, the client refuses to run any other.
"""

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context

from defenses.registry import references
from fedsim import data as datasets
from fedsim.config.experiment import Experiment, read, validate
from fedsim.engine.apps import make_client_app, make_server_app
from fedsim.engine.locations import PartyLocations
from fedsim.engine.run import FederationRun


def find_server_run(context: Context) -> FederationRun:
    """Return the server's run (its experiment, folders and device), as the run config in the server's context describes it.

    The last few runs are cached, so that an equal config gives the same object.
    """
    config = context.run_config
    public = str(config.get("public", ""))
    return _build_run(*_read_config(config), PartyLocations(public=Path(public) if public else None), None)


def find_client_run(context: Context) -> FederationRun:
    """Return this client's run: the experiment and the device from the server's run config, with this client's data and folders.

    Data, folders and client seed come from the client's own node config. The module docstring lists the keys of both configs.
    Code that the node config, or the experiment that the client agreed to, names as `module:function` is imported.

    Raises ValueError if the node config names the experiment that the client agreed to, and the server asks for another one.
    """
    config = context.node_config
    seed = config.get("client-seed")
    if datasets.is_code(str(config.get("data", ""))):
        references.admit(str(config["data"]))
    agreed = read(Path(str(config["experiment"])), trusted=True) if "experiment" in config else None
    run = _build_run(*_read_config(context.run_config), _read_locations(config), None if seed is None else int(seed))
    if agreed is not None and agreed != run.experiment:
        changed = [key for key in Experiment.model_fields if getattr(agreed, key) != getattr(run.experiment, key)]
        raise ValueError(
            f"the server's experiment differs in {', '.join(changed)} from {config['experiment']}, to which this client agreed; "
            "agree with the server's operator on one experiment, and store it in this file"
        )
    return run


def _read_locations(config: Any) -> PartyLocations:
    """Return the client's data set and folders from its node config. A field is None if `config` lacks its key."""
    private, truth, public = (
        Path(str(config[key])).absolute() if key in config else None for key in ("private", "truth", "public")
    )
    return PartyLocations(data=str(config["data"]) if "data" in config else None, private=private, truth=truth, public=public)


def _read_config(config: Any) -> tuple[str, str, str, bool, str, int]:
    texts = str(config["experiment"]), str(config.get("settings", "")), str(config["out"])
    return (*texts, bool(config["resume"]), str(config.get("device", "auto")), int(config.get("threads", 1)))


@lru_cache(maxsize=4)
def _build_run(
    experiment: str, settings: str, out: str, resume: bool, device: str, threads: int, locations: PartyLocations, seed: int | None
) -> FederationRun:
    run = FederationRun(
        experiment=_read_experiment(experiment, settings, trusted=locations.private is None),
        out=Path(out).absolute(),
        resume=resume,
        device=device,
        threads=threads or None,
        client_seed=seed,
        locations=locations,
    )
    return run if locations.private is not None or locations.public is not None else run.settle()


def _read_experiment(path: str, settings: str, *, trusted: bool) -> Experiment:
    """Return the experiment in `settings`, the content of a TOML file. If `settings` is empty, read the file at `path` instead.

    trusted: whether to import code that the file at `path` names, such as a user's model. It is False for a client whose node
    config names a private folder, as in a deployment, since the server chooses the path.
    """
    if settings:
        return validate(tomllib.loads(settings), source="run config, settings")
    here = Path(path)
    return read(here if here.exists() else Path(__file__).parents[2] / path, trusted=trusted)


client = make_client_app(find_client_run)
server = make_server_app(find_server_run)
