"""A fuzzer of the service's API: random hostile requests, drawn from a grammar, on a real run.

    python tests/fuzz/api_fuzzer.py --seconds 600 --seed 1

For each request it checks that the service does not fail (5xx), answers in time with its security headers and valid JSON, reveals
no file outside its root, and neither starts a process nor writes outside its root. It prints its figures as JSON. It does not
request reports, which are made in a separate process, and streams of events, which do not end.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from attacker.attacks import ATTACKS, AttackSpec
from attacker.replay.replay import Replay
from attacker.service.authorisation import SECURITY_HEADERS
from attacker.service.http.app import create_app
from attacker.service.settings import ServiceSettings
from fedsim.config.experiment import validate
from fedsim.engine import engines
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording

ANSWER_SECONDS = 10.0
MEMORY = 10**9
"""Most bytes by which the memory of the service may grow."""
SECRET = "what no answer may hold 5b1c"
EXPERIMENT = {
    "rounds": 1,
    "model": {"name": "mlp", "hidden": [4]},
    "data": "digits",
    "clients": {"count": 2},
    "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 1},
}
METHODS = ("GET",) * 12 + ("POST",) * 4 + ("DELETE", "HEAD", "PUT", "PATCH", "OPTIONS", "TRACE")


class Grammar:
    """A generator of requests. outside: a file that may not be read. ids: of existing recordings, attacks, cases and jobs."""

    def __init__(self, rng: random.Random, outside: Path, ids: dict[str, list[str]]) -> None:
        self.rng, self.outside, self.ids = rng, outside, ids

    def request(self) -> dict[str, Any]:
        method, path = self.rng.choice(METHODS), self.path()
        if self.rng.random() < 0.3:
            method, path = "POST", "/api/v1/jobs"
        made: dict[str, Any] = {"method": method, "url": path + self.query(), "headers": self.headers()}
        if method not in ("GET", "HEAD", "OPTIONS", "TRACE"):
            made["content"] = self.body()
        return made

    def text(self) -> str:
        hostile = [str(self.outside), f"../{self.outside.name}", "..", ".", "~", "", "\0", "%", "%00", "a" * 5000, "null", "-1"]
        hostile += ["1e400", "NaN", "0x1", "é", "\U0001f600", "\ud800", "'; DROP TABLE jobs; --", "<script>", "os:system", "all"]
        hostile += [f"file://{self.outside}", "http://127.0.0.1:1/", "{}", "[]", "1-999999", "0-0", "9" * 400, "digits", "cpl"]
        return self.rng.choice(hostile)

    def name(self, kind: str) -> str:
        return self.rng.choice(self.ids[kind]) if self.rng.random() < 0.7 else self.text()

    def path(self) -> str:
        safe = self.rng.choice(["", "", "/.%"])
        return "/" + "/".join(quote(one, safe=safe, errors="replace") for one in self.parts())

    def parts(self) -> list[str]:
        id, source = self.name("recording"), self.name("source")
        case = ["api", "v1", "recordings", id, "cases", source, self.name("case")]
        shapes = [
            ["api", "v1", self.rng.choice(["recordings", "jobs", "attacks", "health", "session", "openapi.json", self.text()])],
            ["api", "v1", "recordings", id],
            ["api", "v1", "recordings", id, self.rng.choice(["grid", "cases", "observations", "training", "attacks", "leakage"])],
            case,
            [*case, self.rng.choice(["images", "originals", "pairs"]), f"{self.rng.choice(['0', '1', '-1', self.text()])}.png"],
            ["api", "v1", "jobs", self.name("job"), *self.rng.choice([[], ["cancel"], ["retry"], ["preview", "0.png"]])],
            ["page", self.rng.choice(["main.js", "style/base.css", "../settings.py", self.text()])],
            [self.text() for _ in range(self.rng.randrange(6))],
            ["metrics"],
        ]
        return self.rng.choice(shapes)

    def query(self) -> str:
        if self.rng.random() < 0.5:
            return ""
        names = ["limit", "after", "state", "recording", "round", "client", "status", "attack", "token", "x"]
        count = self.rng.randrange(1, 4)
        pairs = [(self.rng.choice(names), self.text() if self.rng.random() < 0.7 else "1") for _ in range(count)]
        return f"?{urlencode(pairs, errors='replace')}"

    def headers(self) -> dict[str, str]:
        made = {"Content-Type": "application/json"} if self.rng.random() < 0.9 else {"Content-Type": "text/plain"}
        hostile = {
            "Host": ["evil.example", "localhost:99999", "", "[::1"],
            "Origin": ["https://evil.example", "null", "http://localhost"],
            "If-None-Match": ['"', "*", "x" * 3000],
            "Cookie": ["fedleak=x", "a" * 3000, "=;=;", "fedleak-=.."],
            "Authorization": ["Bearer ", "Basic x", "Bearer " + "x" * 3000],
            "Content-Length": ["-1", "1e3", "99999999999999999999"],
            "Last-Event-ID": ["x", "0-0", "9" * 50],
            "Range": ["bytes=0-99999999999"],
            "X-Forwarded-For": ["127.0.0.1"],
        }
        for name in self.rng.sample(sorted(hostile), self.rng.choice([0, 0, 0, 1, 2])):
            made[name] = self.rng.choice(hostile[name])
        return made

    def body(self) -> bytes:
        if self.rng.random() < 0.15:
            wide = [b"[" * 30_000, b'{"a":' * 5000, b"x" * 70_000, b'{"seed": ' + b"9" * 4000]
            return self.rng.choice([b"", b"\xff\xfe", b"{}" * 9, *wide])
        text = json.dumps(self.spec() if self.rng.random() < 0.8 else self.value(3))
        return text.encode("utf-8", "surrogatepass")

    def spec(self) -> dict[str, Any]:
        attack = self.rng.choice(list(ATTACKS))
        made: dict[str, Any] = {"recording": self.rng.choice(self.ids["recording"]), "attack": attack}
        arguments = ["init", "auxiliary", "steps", "optimiser", "route", "fallback", "tv", "label_rule", "compiled", "x"]
        if self.rng.random() < 0.7:
            made["arguments"] = {self.rng.choice(arguments): self.value(1) for _ in range(self.rng.randrange(4))}
        if self.rng.random() < 0.2:
            made["arguments"] = {"init": "insider", "auxiliary": str(self.outside)}
        for key in ("recording", "attack", "rounds", "clients", "seed", "null", "priority", "model", "truth"):
            if self.rng.random() < 0.12:
                made[key] = self.value(2)
        return made

    def value(self, depth: int) -> Any:
        plain: list[Any] = [None, True, False, 0, -1, 1, 2**53, 10**300, 1e308, -0.0, self.text(), float("inf"), float("nan")]
        if depth and self.rng.random() < 0.3:
            parts = [self.value(depth - 1) for _ in range(self.rng.randrange(5))]
            return parts if self.rng.random() < 0.5 else {self.text(): part for part in parts}
        return self.rng.choice(plain)


def make_root(folder: Path) -> Path:
    """Record a federation of two clients and attack it; return the root of runs."""
    engines.set_verbosity(False)
    run = folder / "root" / "digits"
    engines.run(FederationRun(experiment=validate(EXPERIMENT, source="fuzzer"), out=run, client_seed=1), engine="local")
    spec = AttackSpec(name="exact", arguments={"fallback": "none"})
    Replay(recording=Recording(run / "recording"), spec=spec, out=run / "reconstructions").run()
    return folder / "root"


@contextmanager
def outside_of(folder: Path) -> Iterator[Path]:
    """Yield a file with a secret beside the root, next to a FIFO; raise AssertionError if anything there has changed."""
    place = folder / "outside"
    place.mkdir()
    (place / "secret.npz").write_text(SECRET)
    os.mkfifo(place / "fifo")
    before = [(path.name, path.lstat()) for path in sorted(place.iterdir())], sorted(path.name for path in folder.iterdir())
    yield place / "secret.npz"
    after = [(path.name, path.lstat()) for path in sorted(place.iterdir())], sorted(path.name for path in folder.iterdir())
    assert [(name, one.st_mtime_ns, one.st_ino) for name, one in before[0]] == [
        (name, one.st_mtime_ns, one.st_ino) for name, one in after[0]
    ], "something was written outside the root"
    assert before[1] == after[1]


def fuzz(seconds: float, seed: int) -> dict[str, Any]:
    """Send random requests for `seconds`; return the figures. Raises AssertionError, with the request, at the first finding."""
    with tempfile.TemporaryDirectory(prefix="api-fuzz-") as name:
        root = make_root(Path(name))
        with outside_of(Path(name)) as outside:
            app = create_app(ServiceSettings(root=root, workers=0, token=False, truth="own", max_queued=50))
            app.state.components.catalogue.scan()
            sources = sorted(path.name for path in (root / "digits" / "reconstructions").iterdir())
            cases = sorted(path.stem for path in (root / "digits" / "reconstructions" / sources[0]).glob("*.safetensors"))
            ids = {"recording": ["digits"], "source": sources, "case": cases, "job": ["0" * 16]}
            grammar = Grammar(random.Random(seed), outside, ids)
            try:
                return asyncio.run(_requests(app, grammar, seconds, seed))
            finally:
                app.state.components.queue.close()


async def _requests(app: Any, grammar: Grammar, seconds: float, seed: int) -> dict[str, Any]:
    statuses, longest, number = Counter[int](), 0.0, 0
    memory, children, began = _memory(), set(_children()), time.monotonic()
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8600") as client:
        while time.monotonic() - began < seconds:
            number += 1
            asked = grammar.request()
            sent = time.monotonic()
            try:
                request = client.build_request(**asked)
            except (httpx.InvalidURL, UnicodeEncodeError, ValueError):
                continue  # no client could send it
            answer = await asyncio.wait_for(client.send(request), ANSWER_SECONDS)
            longest = max(longest, time.monotonic() - sent)
            statuses[answer.status_code] += 1
            _check(asked, answer)
            if answer.status_code == 201:
                grammar.ids["job"] = [*grammar.ids["job"][-20:], answer.json()["id"]]
    grown = _memory() - memory
    assert grown < MEMORY, f"{grown / 1e6:.0f} MB more after {number} requests"
    assert set(_children()) <= children, "a process was started"
    by_status = {str(status): count for status, count in sorted(statuses.items())}
    figures = {"seed": seed, "requests": number, "statuses": by_status, "longest_s": round(longest, 3)}
    return {**figures, "grown_mb": round(grown / 1e6), "failures": 0}


def _check(asked: dict[str, Any], answer: httpx.Response) -> None:
    exchange = f"{asked!r:.2000} -> {answer.status_code} {answer.text[:500]!r}"
    assert answer.status_code < 500, exchange
    assert {name.lower() for name in SECURITY_HEADERS} <= set(answer.headers), exchange
    assert SECRET not in answer.text, exchange
    if answer.headers.get("content-type") == "application/json" and answer.content:
        found = answer.json()
        assert answer.status_code < 400 or found["error"]["message"], exchange


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _children() -> list[str]:
    return [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    given = parser.parse_args()
    print(json.dumps(fuzz(given.seconds, given.seed)))


if __name__ == "__main__":
    sys.exit(main())
