"""What `flwr run .` starts; its run config carries the path of the experiment and of the run's folder.

Relative paths are read from the folder in which Flower's local SuperLink was started, experiments also from this project.
"""

from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from fedsim.app import Run, client_app, server_app
from fedsim.experiment import read


@lru_cache(maxsize=2)
def _run(experiment: str, out: str, resume: bool) -> Run:
    path = Path(experiment)
    if not path.exists():
        path = Path(__file__).parent.parent / experiment
    return Run(experiment=read(path), out=Path(out).absolute(), resume=resume).settled()


def _run_of(context: Context) -> Run:
    config = context.run_config
    return _run(str(config["experiment"]), str(config["out"]), bool(config["resume"]))


client = client_app(_run_of)
server = server_app(_run_of)
