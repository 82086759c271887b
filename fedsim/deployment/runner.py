"""An experiment on a deployment: on one that is there, or on one of this machine's own that ends with it."""

import shutil
import tempfile
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

from fedsim.deployment import certificates
from fedsim.deployment.commands import Link
from fedsim.deployment.flower_commands import NotReached, OnWords, RunFailed, Submitted
from fedsim.deployment.folders import Layout
from fedsim.deployment.native import Native, Party
from fedsim.deployment.processes import Ended, Processes, ended_in_order, is_healthy
from fedsim.recording.files import make_private, read_json_lines

OnRound = Callable[[dict[str, Any]], None]
Config = dict[str, str | int | bool]


class DeploymentFailed(RuntimeError):
    """The federation did not come to its end; the message says why, and where its logs are."""


def run_config(settings: str, out: Path, *, device: str, threads: int | None, public: Path | None, resume: bool) -> Config:
    """What the server and the clients are told of a run. settings: the experiment as TOML. out, public: paths on the server."""
    places = {"out": str(out), "public": "" if public is None else str(public)}
    return {"settings": settings, **places, "resume": resume, "device": device, "threads": threads or 0}


def run_on(link: Link, config: Config, *, on_round: OnRound | None = None, on_words: OnWords | None = None) -> None:
    """Run on the SuperLink at `link`, whose clients are there already. Rounds are told where the run's folder is on this machine.

    on_words: is told what the server says of clients and replies that are missing, wherever the folder is.
    Raises DeploymentFailed; on Ctrl-C and SIGTERM the SuperLink is told to stop the run.
    """
    if not is_healthy(link.address, link.authority):
        secure = "without TLS" if link.authority is None else f"with a certificate that {link.authority} signed"
        raise DeploymentFailed(f"no SuperLink answers at {link.address} {secure}; is it running, and the address right?")
    home = Path(tempfile.mkdtemp(prefix="fedleak-"))
    try:
        with ended_in_order(), Processes(home / "logs") as processes:
            submitted = Submitted.start(link, config, home=home, processes=processes)
            try:
                submitted.wait(_Rounds(Path(str(config["out"])), on_round).tell, on_words)
            except (KeyboardInterrupt, SystemExit):
                submitted.stop()
                raise
    except (NotReached, RunFailed, Ended) as error:
        raise DeploymentFailed(str(error)) from error
    finally:
        shutil.rmtree(home, ignore_errors=True)


def run_natively(
    config: Config,
    out: Path,
    count: int,
    *,
    seed: int | None,
    on_round: OnRound | None = None,
    on_words: OnWords | None = None,
) -> None:
    """Run on a SuperLink and `count` clients that are started here for it, with TLS and keys, and end with it.

    All clients can load all of the data, as in a simulation, and write into the run's folder `out`. seed: draws their secrets.
    Raises DeploymentFailed; the logs of all processes are kept then.
    """
    layout = Layout(Path(tempfile.mkdtemp(prefix="fedleak-")))
    certificates.make_server(layout.root)
    try:
        parties = [_party(layout, out, number, count, seed) for number in range(count)]
        with ended_in_order(), Native(layout, parties) as native:
            submitted = Submitted.start(native.link, config, home=native.home / "runner", processes=native.processes)
            rounds = _Rounds(out, on_round)

            def watch() -> None:
                native.processes.check()
                rounds.tell()

            submitted.wait(watch, on_words)
    except (NotReached, RunFailed, Ended) as error:
        raise DeploymentFailed(f"{error}\nthe logs of all processes are in {layout.root / 'logs'}") from error
    except FileNotFoundError as error:  # Flower is not installed
        shutil.rmtree(layout.root, ignore_errors=True)
        raise DeploymentFailed(str(error)) from error
    except BaseException:
        shutil.rmtree(layout.root, ignore_errors=True)
        raise
    shutil.rmtree(layout.root, ignore_errors=True)


def _party(layout: Layout, out: Path, number: int, count: int, seed: int | None) -> Party:
    home = make_private(layout.client(number))
    certificates.make_client(layout.key(number), layout.keys / f"{number}.pub")
    config: dict[str, str | int] = {"partition-id": number, "num-partitions": count}
    config |= {"private": str(out / "clients"), "truth": str(out / "truth")}
    config |= {} if seed is None else {"client-seed": seed}
    return Party(number=number, key=layout.key(number), config=config, home=home)


class _Rounds:
    """Tells of the rounds that are written down in a run's folder, each once."""

    def __init__(self, out: Path, on_round: OnRound | None) -> None:
        self.path, self.on_round = out / "metrics.jsonl", on_round
        self.told = max((row["round"] for row in read_json_lines(self.path)), default=-1)

    def tell(self) -> None:
        if self.on_round is None:
            return
        for row in read_json_lines(self.path):
            if row["round"] > self.told:
                self.told = row["round"]
                self.on_round({key: nan if value is None else value for key, value in row.items()})
