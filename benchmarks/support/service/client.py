"""A service in a separate process, and clients that send requests to it, for benchmarks/service.py."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SERVE_PROGRAM = "from attacker.cli import main; main()"


class ServiceProcess:
    """A process of `attacker serve` for the recordings in the folder `root`, started at once. It can be killed and started again.

    options: further arguments of the command. place: where it listens, as "HOST:PORT". token: the token that requests must carry.
    """

    def __init__(self, root: Path, *options: str) -> None:
        self.root, self.options = root, options
        self.start()

    def start(self) -> None:
        """Start the process and wait until it answers a request. Raises RuntimeError if it exits before it prints its address."""
        command = [
            sys.executable,
            "-c",
            SERVE_PROGRAM,
            "serve",
            str(self.root),
            "--port",
            "0",
            "--max-queued",
            "5000",
            *self.options,
        ]
        with (self.root.parent / "service.log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"attacker serve exited with status {self.process.wait()}; see {log.name}")
        self.place, self.token = urlsplit(address).netloc, urlsplit(address).fragment.removeprefix("token=")
        self.ask("/api/v1/health")

    def ask(self, path: str, body: Any = None) -> Any:
        """Send a GET request, or `body` as JSON in a POST request, and return the parsed JSON of the answer.

        Raises RuntimeError if the status of the answer is 300 or more.
        """
        connection = http.client.HTTPConnection(self.place, timeout=60)
        try:
            if body is None:
                connection.request("GET", path, headers=make_headers(self.token))
            else:
                connection.request(
                    "POST", path, json.dumps(body), {"Content-Type": "application/json", **make_headers(self.token)}
                )
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            log = (self.root.parent / "service.log").read_text()[-2000:]
            raise RuntimeError(f"the service answered {path} with {answer.status}: {content[:300]!r}; its log ends with\n{log}")
        return json.loads(content)

    def list_items(self, path: str) -> list[dict[str, Any]]:
        """Return all items of a list that the service gives page by page. path: address of the list on the service."""
        items: list[dict[str, Any]] = []
        joint, after = "&" if "?" in path else "?", ""
        while True:
            page = self.ask(f"{path}{joint}limit=200{after}")
            items += page["items"]
            if not page["next"]:
                return items
            after = f"&after={page['next']}"

    def list_workers(self) -> list[int]:
        """Return the ids of the service's child processes, which are its workers."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        return [int(pid) for path in tasks.glob("*/children") for pid in path.read_text().split()]

    def read_megabytes(self) -> float:
        """Return the resident memory of the service in MB (10^6 bytes), without that of its workers."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def kill(self) -> None:
        """Kill the service and its workers with SIGKILL if the service still runs, and wait until it has ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def make_headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def load(
    place: str, token: str, paths: Sequence[str], *, seconds: float, rate: float | None, clients: int = 4
) -> tuple[list[float], float]:
    """Send GET requests to each of `paths` in turn, from `clients` connections at the same time.

    Returns the duration of each request in seconds, and the wall time of all of them together in seconds. Raises the first error
    of a connection, once all have ended: RuntimeError if an answer has another status than 200.

    seconds: time in which requests are started or, with `rate`, become due; each of these is completed, even if it is late.
    rate:    requests per second of all connections together. The duration of a request begins when it was due, so that the time
             for which it had to wait for earlier ones counts. None: each connection sends a request as soon as the previous one
             is answered.
    """
    taken: list[float] = []
    start = time.perf_counter() + 0.05

    def send_requests(number: int) -> None:
        own, count = list[float](), 0
        with closing(http.client.HTTPConnection(place, timeout=60)) as connection:
            while True:
                due = start + (count * clients + number) / rate if rate else time.perf_counter()
                if due > start + seconds:
                    break
                time.sleep(max(0.0, due - time.perf_counter()))
                path = paths[(count * clients + number) % len(paths)]
                connection.request("GET", path, headers=make_headers(token))
                answer = connection.getresponse()
                content = answer.read()
                if answer.status != 200:
                    raise RuntimeError(
                        f"the service answered {path} with status {answer.status}: {content[:300]!r}; see service.log"
                    )
                own.append(time.perf_counter() - due)
                count += 1
        taken.extend(own)

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(send_requests, number) for number in range(clients)]:
            done.result()
    return taken, time.perf_counter() - start


def main() -> None:
    """Run `load` with the command line PLACE SECONDS RATE PATH..., and print its two results as JSON.

    RATE 0 stands for None. The token is read from standard input.
    """
    place, seconds, rate, *paths = sys.argv[1:]
    token = sys.stdin.readline().strip()  # other users of the machine see command lines
    print(json.dumps(load(place, token, paths, seconds=float(seconds), rate=float(rate) or None)))


def run_load(service: ServiceProcess, paths: Sequence[str], *, seconds: float, rate: float | None) -> tuple[list[float], float]:
    """Run `load` in a process of its own, so that work of this process does not delay its requests; return its two results.

    Raises CalledProcessError if `load` fails.
    """
    command = [sys.executable, __file__, service.place, str(seconds), str(rate or 0.0), *paths]
    taken, elapsed = json.loads(
        subprocess.run(command, check=True, input=service.token, stdout=subprocess.PIPE, text=True).stdout
    )
    return taken, elapsed


if __name__ == "__main__":
    main()
