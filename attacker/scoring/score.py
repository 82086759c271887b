"""Where truth meets reconstruction, and nowhere else: one row for each true example."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import assign
from attacker.scoring.metrics import mse, psnr, ssim, succeeded
from fedsim import datasets
from fedsim.truth import TruthReader, Used
from fedsim.wire.files import make_private, read_json_lines, write_bytes

NO_LPIPS = "not computed: no backbone weights were given"
EFFORT = ("iterations", "evaluations", "restarts", "seconds", "route", "interrupted")

Row = dict[str, Any]


class Scorer:
    """Scores the reconstructions of one run.

    run:   folder that gets `scores.jsonl` and `pairs/`.
    truth: folders that clients wrote; in a deployment, one a client.
    data:  name and arguments of the data set, where they differ from what truth says (paths on another machine).
    Raises ValueError where the data set is not the one that truth refers to.
    """

    def __init__(self, run: Path, truth: Sequence[Path], data: tuple[str, dict[str, Any]] | None = None) -> None:
        self.run = run
        self.readers = [TruthReader(folder) for folder in truth]
        described = self.readers[0].dataset
        name, arguments = data or (described["name"], described["arguments"])
        self.data = datasets.load(name, **arguments)
        for reader in self.readers:
            if self.data.content_hash() != reader.dataset["content_hash"]:
                raise ValueError(f"data set {name} is not the one that {reader.folder} refers to: its content differs")

    def score(self, folder: Path) -> list[Row]:
        """Score one attack's folder of reconstructions; its rows replace earlier ones in `scores.jsonl`."""
        facts = json.loads((folder / "attack.json").read_text())
        pairs = make_private(make_private(self.run / "pairs") / folder.name)
        rows = [row for case in facts["cases"] if case["status"] == "complete" for row in self._case(folder, facts, case, pairs)]
        path = self.run / "scores.jsonl"
        others = [row for row in read_json_lines(path) if row["source"] != folder.name]
        write_bytes(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in [*others, *rows]).encode())
        return rows

    def originals(self, round: int, attempt: int, client: str) -> tuple[list[tuple[int, int, int]], Tensor, Tensor]:
        """(batch, position, index) of each example that a client used in a round, at its first use, and x and y of them."""
        seen: dict[int, tuple[int, int, int]] = {}
        for batch, position, index in self.used(round, attempt, client).examples:
            seen.setdefault(index, (batch, position, index))
        examples = list(seen.values())
        return examples, *self.data.train[[index for _, _, index in examples]]

    def used(self, round: int, attempt: int, client: str) -> Used:
        """What a client used in a round. Raises ValueError where no folder of truth says."""
        for reader in self.readers:
            try:
                return reader.used(round, attempt, client)
            except KeyError:
                continue
        raise ValueError(f"no truth of client {client} in round {round}: was --truth given for every client?")

    def _case(self, folder: Path, facts: Row, case: Row, pairs: Path) -> Iterator[Row]:
        examples, truth, labels = self.originals(case["round"], case["attempt"], case["client"])
        found, reason = _read(folder, case["key"])
        common = {
            "run": facts["run"]["name"],
            "source": folder.name,
            "attack": facts["attack"],
            "spec": facts["spec"],
            "null": facts["null"],
            "knows_defense": facts["knows_defense"],
            "oracles": facts["oracles"],
            **{key: facts["run"][key] for key in ("model", "defense", "gradient", "network", "inputs", "secure_aggregation")},
            "data": self.data.name,
            "case": case["key"],
            "rounds": [case["round"]],
            "client": case["client"],
            "seed": facts["seed"],
        }
        if found is None:
            for example, label in zip(examples, labels.tolist(), strict=True):
                yield {**common, **self._place(example, label), **dict.fromkeys(EFFORT), **_failure(reason)}
            return
        x = found.x.nan_to_num().clamp(0, 1)
        read = labels_read(labels.tolist(), found.y.tolist())
        effort = {name: getattr(found, name) for name in EFFORT}
        for i, candidate in enumerate(assign(x, truth)):
            place = self._place(examples[i], int(labels[i]))
            if candidate is None:
                yield {**common, **place, **effort, **_failure("fewer reconstructions than examples")}
                continue
            recovered = int(found.y[candidate])
            yield {
                **common,
                **place,
                **effort,
                **self._measure(x[candidate, None], found.x[candidate, None], truth[i, None]),
                "label_recovered": recovered,
                "label_recovered_name": self._class(recovered),
                "label_success": read[i],
                "confidence": float(found.confidence[candidate].nan_to_num()),
                "pair": self._write_pair(pairs / f"{case['key']}-{place['batch']}-{place['position']}", truth[i], x[candidate]),
            }

    def _place(self, example: tuple[int, int, int], label: int) -> Row:
        batch, position, index = example
        where = {"batch": batch, "position": position, "index": index}
        return {**where, "label_true": label, "label_true_name": self._class(label), "link_correct": None}

    def _class(self, label: int) -> str:
        return self.data.class_names[label] if 0 <= label < len(self.data.class_names) else str(label)

    def _measure(self, x: Tensor, raw: Tensor, truth: Tensor) -> Row:
        image = self.data.spec.is_image
        unclamped = float(mse(raw, truth))
        return {
            "mse": float(mse(x, truth)),
            "mse_raw": unclamped if np.isfinite(unclamped) else None,
            "psnr": float(psnr(x, truth)) if image else None,
            "ssim": float(ssim(x, truth)) if image and min(truth.shape[-2:]) >= 11 else None,
            "lpips": None,
            "lpips_reason": NO_LPIPS if image else "not an image",
            "success": bool(succeeded(x, truth)),
            "failure": None,
        }

    def _write_pair(self, path: Path, truth: Tensor, x: Tensor) -> str:
        """Original and reconstruction side by side; a table row as JSON."""
        if self.data.spec.is_image:
            path = path.with_name(path.name + ".png")
            pixels = (torch.cat([truth, x], dim=2) * 255).round().to(torch.uint8).numpy()
            image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
            image.save(path)
        else:
            path = path.with_name(path.name + ".json")
            columns = [column.name for column in self.data.spec.columns]
            path.write_text(json.dumps({"columns": columns, "original": truth.tolist(), "reconstruction": x.tolist()}))
        path.chmod(0o600)
        return str(path.relative_to(self.run))


def labels_read(true: Sequence[int], recovered: Sequence[int]) -> list[bool]:
    """For each true label, whether it is among the recovered ones, each of which counts once.

    A gradient does not say which image has which label: the multiset is what leaks.
    """
    left = Counter(recovered)
    read = []
    for label in true:
        read.append(left[label] > 0)
        left[label] -= 1
    return read


def _read(folder: Path, key: str) -> tuple[Reconstruction | None, str]:
    path, failed = folder / f"{key}.safetensors", folder / f"{key}.failed.json"
    if path.exists():
        try:
            return Reconstruction.read(path), ""
        except ValueError as error:
            return None, str(error)
    return None, json.loads(failed.read_text())["reason"] if failed.exists() else "not attacked yet"


def _failure(reason: str) -> Row:
    measures = ("mse", "mse_raw", "psnr", "ssim", "lpips", "label_recovered", "label_recovered_name", "confidence", "pair")
    return {
        **dict.fromkeys(measures),
        "lpips_reason": "no reconstruction",
        "label_success": False,
        "success": False,
        "failure": reason,
    }
