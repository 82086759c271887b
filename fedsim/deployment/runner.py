"""Runs of an experiment on an existing deployment, or on one that is started on this machine for the run."""

import shutil
import tempfile
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

from fedsim.deployment import certificates
from fedsim.deployment.commands import Link
from fedsim.deployment.flower_commands import NotReached, OnWords, RunFailed, SubmittedRun
from fedsim.deployment.folders import Layout
from fedsim.deployment.health import is_healthy
from fedsim.deployment.native import NativeDeployment, Party
from fedsim.deployment.processes import ProcessEnded, Processes, handle_sigterm
from fedsim.recording.files import make_private
from fedsim.recording.round_metrics import read_metrics

OnRound = Callable[[dict[str, Any]], None]
Config = dict[str, str | int | bool]
MAX_CONTINUATIONS = 3
"""How often a run that failed because its SuperLink was lost is continued from its last finished round."""


class DeploymentFailed(RuntimeError):
    """Error for a federation that did not finish; the message states the reason."""


def make_run_config(settings: str, out: Path, *, device: str, threads: int | None, public: Path | None, resume: bool) -> Config:
    """Return Flower's run config, a dict with the keys settings, out, public, resume, device and threads.

    settings: the experiment as TOML.
    out:      folder of the run on the server.
    device:   "cpu", "cuda", or "auto" for CUDA if available.
    threads:  PyTorch's intra-op threads of one client; None for PyTorch's default, written as 0.
    public:   folder of public facts about the data on the server; None, written as "", if the server has the data.
    resume:   whether to continue an unfinished run.
    """
    places = {"out": str(out), "public": "" if public is None else str(public)}
    return {"settings": settings, **places, "resume": resume, "device": device, "threads": threads or 0}


def run_on(link: Link, config: Config, *, on_round: OnRound | None, on_words: OnWords | None) -> None:
    """Run a federation on the SuperLink at `link`, to which the clients are already connected, and wait until it finishes.

    config:   the app's run config, see `make_run_config`.
    on_round: called with the row of metrics, a dict, of each newly finished round if the run's folder is on this machine.
    on_words: called with each line in which the server warns of missing clients, missing replies or failures, wherever the run's
              folder is.
    Raises DeploymentFailed, also if Flower's command is not installed.
    On Ctrl-C and SIGTERM the SuperLink is asked to stop the run.
    """
    if not is_healthy(link.address, link.authority):
        tls = "off" if link.authority is None else f"on, with a certificate signed by {link.authority}"
        raise DeploymentFailed(
            f"no SuperLink answers at {link.address} (TLS is {tls}); check that it runs, that this is its address, and that it "
            "uses TLS in the same way"
        )
    home = Path(tempfile.mkdtemp(prefix="fedleak-"))
    try:
        with handle_sigterm(), Processes(home / "logs") as processes:
            rounds = _Rounds(Path(str(config["out"])), on_round)
            run_to_end(link, config, home, processes, rounds.report_rounds, on_words)
    except (NotReached, RunFailed, ProcessEnded, FileNotFoundError) as error:
        raise DeploymentFailed(str(error)) from error
    finally:
        shutil.rmtree(home, ignore_errors=True)


def run_to_end(
    link: Link, config: Config, home: Path, processes: Processes, watch: Callable[[], None], on_words: OnWords | None
) -> None:
    """Submit a run to the SuperLink at `link` and wait for its end, calling `watch` repeatedly while it runs.

    A run that fails after the SuperLink was unreachable is continued from its last finished round, up to `MAX_CONTINUATIONS`
    times, since Flower loses what was being transferred when its SuperLink stops.
    config:    the app's run config, see `make_run_config`.
    home:      folder for Flower's configuration.
    processes: group to which the process of Flower's command is added.
    on_words:  as for `run_on`.
    On Ctrl-C and SystemExit, the SuperLink is asked to stop the run.
    Raises NotReached if the SuperLink does not start the run or does not answer, RunFailed if the run fails and is not continued,
    and FileNotFoundError if Flower's command is not installed.
    """
    for left in reversed(range(MAX_CONTINUATIONS + 1)):
        submitted = SubmittedRun.start(link, config, home=home, processes=processes)
        try:
            submitted.wait(watch, on_words)
            return
        except RunFailed as error:
            if not (left and error.was_unreachable and error.status == "finished:failed"):
                raise
            if on_words is not None:
                on_words(f"{error}; the SuperLink was unreachable before, so the run continues from its last finished round")
            config = {**config, "resume": True}
        except (KeyboardInterrupt, SystemExit):
            submitted.stop()
            raise


def run_natively(
    config: Config, out: Path, count: int, *, seed: int | None, on_round: OnRound | None, on_words: OnWords | None
) -> None:
    """Start a SuperLink and `count` clients on this machine, with TLS and keys, run the federation, and stop them.

    All clients can load all data, as in a simulation, and write into the run's folder `out`.
    config:             the app's run config, see `make_run_config`.
    seed:               seed of the clients' secrets, from which each client draws its noise and other random choices; None draws
                        the secrets from the operating system.
    on_round, on_words: as for `run_on`.
    Raises DeploymentFailed. If processes were started, the message names the folder in which the logs of all of them are kept.
    """
    layout = Layout(Path(tempfile.mkdtemp(prefix="fedleak-")))
    certificates.make_server(layout.root)
    try:
        parties = [_make_party(layout, out, number, count, seed) for number in range(count)]
        with handle_sigterm(), NativeDeployment(layout, parties) as native:
            rounds = _Rounds(out, on_round)

            def watch() -> None:
                native.processes.check()
                rounds.report_rounds()

            run_to_end(native.link, config, native.home / "runner", native.processes, watch, on_words)
    except (NotReached, RunFailed, ProcessEnded) as error:
        raise DeploymentFailed(f"{error}\nthe logs of all processes are in {layout.root / 'logs'}") from error
    except FileNotFoundError as error:  # Flower is not installed
        shutil.rmtree(layout.root, ignore_errors=True)
        raise DeploymentFailed(str(error)) from error
    except BaseException:
        shutil.rmtree(layout.root, ignore_errors=True)
        raise
    shutil.rmtree(layout.root, ignore_errors=True)


def _make_party(layout: Layout, out: Path, number: int, count: int, seed: int | None) -> Party:
    home = make_private(layout.make_client_path(number))
    certificates.make_client(layout.make_key_path(number), layout.keys / f"{number}.pub")
    config: dict[str, str | int] = {"partition-id": number, "num-partitions": count}
    config |= {"private": str(out / "clients"), "truth": str(out / "truth")}
    config |= {} if seed is None else {"client-seed": seed}
    return Party(number=number, key=layout.make_key_path(number), config=config, home=home)


class _Rounds:
    """Reporter of finished rounds: calls `on_round` once with the row of metrics of each round that is added to folder `out`."""

    def __init__(self, out: Path, on_round: OnRound | None) -> None:
        self.run, self.on_round = out, on_round
        self.last_reported = max((row["round"] for row in read_metrics(self.run)), default=-1)

    def report_rounds(self) -> None:
        if self.on_round is None:
            return
        for row in read_metrics(self.run):
            if row["round"] > self.last_reported:
                self.last_reported = row["round"]
                self.on_round({key: nan if value is None else value for key, value in row.items()})
