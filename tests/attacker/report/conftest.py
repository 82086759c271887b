"""Fixtures of tests of the report: tiny runs on disk, written by the project's own writers where they exist."""

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from reconstructions import make_reconstruction

from attacker.reconstruction import list_slots
from attacker.report import build, figures
from defenses.spec import DefenseSpec
from fedsim.recording import Column, DataSpec, Manifest, ModelSpec, Payload, Recorder, Reply, Training
from fedsim.recording.files import append_json_lines, write_bytes, write_json

CLIENTS = ("ada", "bob")
ROUNDS = (1, 2)


@dataclass(frozen=True)
class RunFolder:
    """A run to report on, with methods that change it."""

    path: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "scores.jsonl").read_text().splitlines()]

    def forget_truth(self) -> None:
        """Remove the true examples and the scores, as in a recording of somebody else's federation."""
        for name in ("truth", "pairs"):
            shutil.rmtree(self.path / name)
        (self.path / "scores.jsonl").unlink()

    def rewrite(self, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Pass every row of the scores through `change`; None drops it."""
        rows = [row for row in map(change, self.rows) if row is not None]
        write_bytes(self.path / "scores.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    def attack(self, name: str = "cpl", *, success: bool = True, oracles: Sequence[str] = (), knows: bool = True) -> None:
        """Write the results and scores of an attack and of its null for every observation."""
        for null in (False, True):
            spec = f"{name}({'' if knows else 'knows_defense=False'})" + (" without gradient" if null else "")
            source = f"{name}{'-null' if null else ''}-{len(list(self.path.glob('reconstructions/*'))):08x}"
            facts = {"attack": name, "spec": spec, "null": null, "knows_defense": knows, "oracles": [] if null else list(oracles)}
            self._replay(source, facts)
            self._score(source, facts, success=success and not null)

    def _replay(self, source: str, facts: dict[str, Any]) -> None:
        folder = self.path / "reconstructions" / source
        folder.mkdir(parents=True)
        data = Manifest.read(self.path / "recording" / "manifest.json").data
        cases = []
        for number, client in ((n, c) for n in ROUNDS for c in CLIENTS):
            key = f"{number:05d}-{client}"
            cases.append({"key": key, "round": number, "client": client, "attempt": 1, "num_examples": 1, "status": "complete"})
            make_reconstruction(
                key,
                torch.full((1, *data.shape), 0.75 if facts["null"] else 0.25),
                torch.zeros(1, dtype=torch.int64),
                slots=list_slots(number, client, [1]),
                loss=torch.tensor([1.0, 0.1, 0.0, float("nan")]),
                seconds=0.5,
                attack=facts["spec"],
                oracles=tuple(facts["oracles"]),
            ).write(folder / f"{key}.safetensors")
        write_json(folder / "attack.json", {**facts, "seed": 0, "run": {}, "cases": cases})

    def _score(self, source: str, facts: dict[str, Any], *, success: bool) -> None:
        manifest = Manifest.read(self.path / "recording" / "manifest.json")
        for index, (number, client) in enumerate((n, c) for n in ROUNDS for c in CLIENTS):
            key = f"{number:05d}-{client}"
            row = {
                **facts,
                "run": manifest.name,
                "source": source,
                "defense": str(manifest.defense),
                "data": "squares",
                "seed": 0,
                "case": key,
                "rounds": [number],
                "client": client,
                "batch": 1,
                "position": 0,
                "index": index,
                "label_true_name": "cat",
                "label_recovered_name": "cat" if success else "dog",
                "label_success": success,
                "success": success,
                "mse": 1e-4 if success else 0.1,
                "psnr": 40.0 if success else 10.0,
                "ssim": None,
                "ssim_global": 0.5,
                "lpips": None,
                "lpips_net": None,
                "lpips_reason": "no weights",
                "iterations": 4,
                "seconds": 0.5,
                "interrupted": False,
                "failure": None,
                "pair": self._pair(source, key, index, manifest.data),
            }
            append_json_lines(self.path / "scores.jsonl", row)

    def _pair(self, source: str, key: str, index: int, data: DataSpec) -> str:
        file = f"pairs/{source}/{key}-1-0.{'png' if data.is_image else 'json'}"
        (self.path / file).parent.mkdir(parents=True, exist_ok=True)
        if data.is_image:
            Image.fromarray(np.full((12, 24, 3), 40 * index + 5, dtype=np.uint8)).save(self.path / file)
        else:
            names = [column.name for column in data.columns]
            write_json(self.path / file, {"columns": names, "original": [0.5, 0.25], "reconstruction": [0.75, 0.5]})
        return file


class Page(HTMLParser):
    """A parsed page: its start tags and its visible text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._words: list[str] = []
        self._silent = False
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._silent = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self._words).split()).replace("\N{EN DASH}", "-")

    def classed(self, name: str) -> int:
        return sum(name in (attributes.get("class") or "").split() for _, attributes in self.tags)

    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.tags if "id" in attributes]


@pytest.fixture(scope="session")
def charts() -> dict[bytes, str | None]:
    """The charts drawn so far, by function and arguments. A chart takes a tenth of a second, and most runs have the same ones."""
    return {}


@pytest.fixture(autouse=True)
def _equal_charts_are_drawn_once(charts: dict[bytes, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    for draw in (figures.draw_loss_curves, figures.draw_over_rounds):

        def find(*given: Any, _draw: Callable[..., str | None] = draw, **named: Any) -> str | None:
            key = pickle.dumps((_draw.__name__, given, named))
            if key not in charts:
                charts[key] = _draw(*given, **named)
            return charts[key]

        monkeypatch.setattr(figures, draw.__name__, find)


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Page]:
    return lambda *runs: Page(build([run.path for run in runs], tmp_path / "report.html"))


@pytest.fixture
def read_page() -> Callable[[Path], Page]:
    """Function that parses a page from its file."""
    return Page


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunFolder]:
    """Function that writes a recorded run without attacks."""

    def make(
        folder: str = "first",
        *,
        name: str = "first",
        defense: str = "",
        columns: Sequence[Column] = (),
        network: str = "",
        **keys: Any,
    ) -> RunFolder:
        shape = (len(columns),) if columns else (3, 12, 12)
        manifest = Manifest(
            name=name,
            model=ModelSpec(name="lenet", network=network),
            data=DataSpec(shape=shape, num_classes=2, columns=tuple(columns)),
            training=Training(learning_rate=0.1, batch_size=1, steps=1),
            defense=DefenseSpec.parse(defense),
            created="2026-01-01T00:00:00Z",
            software={"torch": "2.6"},
            **keys,
        )
        run = tmp_path / folder
        (run / "truth").mkdir(parents=True)
        recorder = Recorder(run / "recording", manifest)
        weights = {"w": torch.zeros(2)}
        for number in ROUNDS:
            recorder.record_sent(number, weights)
            for client in CLIENTS:
                payload = Payload(tensors=weights, codec="dense")
                recorder.record_reply(number, Reply(client=client, node="7", payload=payload, num_examples=1, bytes=8))
            if number == 2:
                recorder.record_reply(2, Reply(client="eve", node="9", status="failed", reason="went <away>"))
            recorder.commit(number, CLIENTS)
        append_json_lines(run / "metrics.jsonl", {"round": 0, "loss": 2.0, "accuracy": 0.25, "seconds": 0.1})
        for number in ROUNDS:
            utility = {"loss": 1.0 / number, "accuracy": None if number == 1 else 0.75}
            sent = {"bytes_down": 8, "bytes_up": 16, "clients": 2, "missing": 0, "seconds": 0.1}
            append_json_lines(run / "metrics.jsonl", {"round": number, **utility, **sent})
        return RunFolder(run)

    return make


@pytest.fixture
def run(make_run: Callable[..., RunFolder]) -> RunFolder:
    """A recorded run without attacks."""
    return make_run()


@pytest.fixture
def attacked(run: RunFolder) -> RunFolder:
    """The run after an attack, cpl(), that recovered all examples."""
    run.attack()
    return run
