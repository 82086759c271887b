"""Scorer that compares reconstructions with the true examples, one row per example and case.

A case is the observations that are attacked together: one round of a client, or several.
"""

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from attacker.attacks.learned.perceptual import BACKBONES, Lpips, load_lpips
from attacker.attacks.learned.perceptual import load as load_backbone
from attacker.reconstruction import Reconstruction
from attacker.replay.environment import describe_environment
from attacker.replay.metadata_reader import read_metadata
from attacker.scoring import semantic
from attacker.scoring.comparison import MeasuredReconstruction, compare_examples, compare_with_other, pair_clients, read_answer
from attacker.scoring.gallery import Gallery
from attacker.scoring.growth import CaseGrowth, write_growth
from attacker.scoring.measures import make_empty_measures, measure
from attacker.scoring.row_pairs import FILLED_SCORES as FILLED
from attacker.scoring.rows import ScoreRow, replace_rows
from attacker.scoring.states import REASON_UNMATCHED, CaseState
from attacker.scoring.superseded_cases import find_superseded
from attacker.scoring.threat import classify_threat, list_concessions
from attacker.scoring.truth.bounds import CaseBounds
from attacker.scoring.truth.originals import Original, list_uses, make_link_fields
from attacker.scoring.truth.recorded_updates import UpdateCheck, explain_unmatched
from attacker.scoring.truth.run_truth import NoTruth, RunTruth
from fedsim.recording import DataSpec, Recording, find_recording
from fedsim.recording.files import hold_lock, make_private, write_bytes
from fedsim.recording.run_check import check_run
from fedsim.recording.safe_files import DamagedFile, to_printable

RUN_FIELDS = ("model", "defense", "gradient", "network", "inputs", "secure_aggregation")
"""Settings of the federation that every score row repeats."""
EFFORT_FIELDS = ("iterations", "evaluations", "restarts", "seconds", "route", "interrupted")


class Scorer:
    """A scorer of the reconstructions of one run.

    run:   folder that `scores.jsonl` and `pairs/` are written to.
    truth: folders in which clients recorded which examples they used; in a deployment, one per client, each with its own data
           set.
    data:  name and arguments of the data set, if they differ from the name and arguments in truth (such as paths on another
           machine). If the name is the same, arguments that are not given are taken from truth.
    lpips_net, lpips_weights: backbone and weight file of LPIPS, see `perceptual.load`. If neither a file is given nor torchvision
                              has one in its cache, LPIPS is not computed and rows give the reason.
    tagger: name of the tagger whose tags of originals and reconstructions are compared, or `module:function`, see `semantic`;
            None for none. If it is not installed, rows give the reason.
    bound_seconds: time budget for the lower bounds on the errors of all cases together; 0 for no bounds. Bounds need the run's
                   recording.
    Raises ValueError if the data set is not the one that truth refers to, if the backbone is unknown, or if the given file does
    not hold the right weights, and FileNotFoundError if the given file does not exist.

    Attributes that tell what is missing, filled by `score`:

    bounds:     None without `bound_seconds`; its `reasons` is a dict from the key of each case without a bound to the reason.
    without_truth: dict from the name of an attack's folder to the keys of its cases without truth, which get no rows.
    mismatches: dict from the name of an attack's folder to why its scores may be worthless: its answers, or the recorded updates,
                do not fit the truth, see `UpdateCheck`. Only folders with such a reason are in it.
    superseded: dict from the name of an attack's folder to its cases whose examples are scored in another case of the same
                rounds, wholly or in part: a dict from the key of such a case to a text about it. See `find_superseded`.
    """

    def __init__(
        self,
        run: Path,
        truth: Sequence[Path],
        data: tuple[str, dict[str, Any]] | None = None,
        *,
        lpips_net: str = "alex",
        lpips_weights: Path | None = None,
        tagger: str | None = None,
        bound_seconds: float = 0,
    ) -> None:
        self.run = run
        check_run(run)
        self.without_truth: dict[str, list[str]] = {}
        self.superseded: dict[str, dict[str, str]] = {}
        self.mismatches: dict[str, str] = {}
        self._lpips = lpips_net, lpips_weights
        if lpips_weights or lpips_net not in BACKBONES:
            load_backbone(*self._lpips)
        self.truth = RunTruth(truth, data)
        self.data = self.truth.data
        self.tagger = semantic.load_tagger(tagger, self.data.spec)
        self.bounds: CaseBounds | None = None
        self.check = UpdateCheck(run, self.truth)
        if bound_seconds:
            recording = Recording(find_recording(run))
            self.bounds = CaseBounds(recording, self.data, self.truth.read_used, seconds=bound_seconds)

    @cached_property
    def lpips(self) -> Lpips | str:
        """Return the LPIPS model, or as text the reason why there is none."""
        return load_lpips(self.data.spec, *self._lpips)

    @cached_property
    def gallery(self) -> Gallery:
        """Return a random sample of the training examples, with which re-identification compares reconstructions."""
        return Gallery.of(self.data)

    def score(self, folder: Path, only: Container[str] | None = None) -> list[ScoreRow]:
        """Score the reconstructions in the folder of one attack, and return the rows of the cases scored now.

        In `scores.jsonl` the new rows replace earlier rows of these cases. Pairs of original and reconstruction are written into
        `pairs/`. For an attack that uses several rounds together, its rows of `growth.jsonl` are replaced as well.
        only: keys of the cases to score. By default all cases with an update are scored, and all earlier rows of the folder are
              replaced. If the attack uses several rounds together, the other cases of a chosen case's client are scored again,
              too: the examples of a round that several of these cases share are scored in only one of them, see
              `find_superseded`. A case whose rounds are all scored in other cases gets no rows.

        Cases without truth get no rows and are listed in `without_truth`. If there are no rows for this reason, raises NoTruth
        and leaves the scores as they are. Raises ValueError, naming the file, if `attack.json` cannot be read.
        """
        check_run(folder)
        metadata = read_metadata(folder / "attack.json")
        if missing := [key for key in ("name", *RUN_FIELDS) if key not in metadata["run"]]:
            raise DamagedFile(folder / "attack.json", f"lacks the entry {missing[0]} of its run; replay the attack again")
        try:
            ScoreRow.from_dict({**_make_shared_fields(folder, metadata), "case": "", "index": 0})
        except ValueError as error:
            raise DamagedFile(folder / "attack.json", f"{to_printable(str(error))}; replay the attack again") from None
        pairs = make_private(self.run / "pairs" / folder.name, below=self.run)
        rows: list[ScoreRow] = []
        problems: dict[str, NoTruth] = {}
        overlaps = find_superseded(folder, metadata["cases"])
        self.superseded[folder.name] = {key: overlap.words for key, overlap in overlaps.items()}
        cases, other_clients = _select_cases(metadata["cases"], only), pair_clients(metadata["cases"])
        only = None if only is None else {case["key"] for case in cases}
        for case in cases:
            overlap = overlaps.get(case["key"])
            if case["status"] == "complete" and (overlap is None or overlap.rest):
                try:
                    scored = self._score_case(folder, metadata, case, pairs, other_clients.get(case["key"]))
                    rows += [row for row in scored if overlap is None or overlap.rounds.isdisjoint(row.rounds)]
                except NoTruth as error:
                    problems[case["key"]] = error
        self.without_truth[folder.name] = list(problems)
        if mismatch := next((row.mismatch for row in rows if row.mismatch), "") or explain_unmatched(rows):
            self.mismatches[folder.name] = mismatch
        if problems and not rows:
            raise next(iter(problems.values()))
        path = self.run / "scores.jsonl"
        with hold_lock(pairs.parent / ".lock", below=self.run, wait=True):  # another attack may be scored at the same time
            replace_rows(path, rows, folder.name, only)
            write_growth(self.run, folder.name, self._measure_growth(folder, metadata))
        return rows

    def _measure_growth(self, folder: Path, metadata: dict[str, Any]) -> Iterator[CaseGrowth]:
        """Yield one `CaseGrowth` for each case: how many of its examples are recovered from how many rounds.

        If no case of the attack can hold several rounds, nothing is yielded. Otherwise all cases of the attack are included, also
        cases of one round, and cases whose rounds are part of another case. Cases without an update, cases without truth and
        waiting cases are left out.
        """
        if not any("rounds" in case for case in metadata["cases"]):
            return
        for case in (case for case in metadata["cases"] if case["status"] == "complete"):
            observed = list_uses(case)
            try:
                examples, truth, labels = self.truth.read_originals(observed)
            except NoTruth:
                continue
            reconstruction, state, _ = read_answer(folder, case["key"], truth)
            if state == "waiting":
                continue
            recovered = 0
            if reconstruction is not None:
                counts, no_lpips = self.truth.count_places(observed, examples, _read_epochs(metadata)), "not measured here"
                measured = compare_examples(reconstruction, truth, labels.tolist(), self.data.spec, lpips=no_lpips, counts=counts)
                recovered = sum(fields is not None and fields["success"] is True for fields in measured.fields)
            rounds = tuple(sorted(observation.round for observation in observed))
            common = {"source": folder.name, "case": case["key"], "client": case["client"]}
            yield CaseGrowth(**common, rounds=rounds, examples=len(examples), recovered=recovered)

    def _score_case(
        self, folder: Path, metadata: dict[str, Any], case: dict[str, Any], pairs: Path, other: str | None
    ) -> Iterator[ScoreRow]:
        """Yield the rows of one case, and write its pairs of original and reconstruction into the folder `pairs`.

        Raises NoTruth if no folder of truth has its examples. other: key of the case of another client that it is compared with,
        see `pair_clients`; None if there is none.
        """
        observed = list_uses(case)
        examples, truth, labels = self.truth.read_originals(observed)
        counts = self.truth.count_places(observed, examples, _read_epochs(metadata))
        reconstruction, state, reason = read_answer(folder, case["key"], truth)
        baselines: list[dict[str, Any]] = [{}] * len(examples)
        if state != "waiting":
            constant = self.gallery.repeat_constant(len(truth))
            baselines = compare_with_other(folder, other, truth, labels.tolist(), self.data.spec, counts, constant, self.lpips)
        common = {
            **_make_shared_fields(folder, metadata),
            **_make_case_fields(case, reconstruction, state),
            "data": self.data.name,
            "mismatch": self.check.explain_mismatch(observed),
        }
        bounds = self.bounds.find(case["key"], observed) if self.bounds is not None and not metadata["null"] else {}
        known = [
            {
                **common,
                **asdict(example),
                "label_true": label,
                "label_true_name": self._name_class(label),
                "bound_mse": bounds.get(example.index),
                **baseline,
            }
            for example, label, baseline in zip(examples, labels.tolist(), baselines, strict=True)
        ]
        if reconstruction is None:
            for example, fields, measures in zip(examples, known, self._score_missing(truth, state, reason), strict=True):
                yield ScoreRow(**fields, **make_link_fields(example, None), **measures)
            return
        measured = compare_examples(
            reconstruction,
            truth,
            labels.tolist(),
            self.data.spec,
            lpips=self.lpips,
            counts=counts,
            gallery=self.gallery,
            tagger=self.tagger,
            indices=[example.index for example in examples],
        )
        yield from self._make_measured_rows(examples, truth, known, measured, pairs / case["key"], whole=len(observed) > 1)

    def _make_measured_rows(
        self,
        examples: Sequence[Original],
        truth: Tensor,
        known: Sequence[dict[str, Any]],
        measured: MeasuredReconstruction,
        pair: Path,
        *,
        whole: bool,
    ) -> Iterator[ScoreRow]:
        """Yield a row for each original of a case that has a reconstruction, and write their pairs.

        examples, truth: the originals, and their values (N, *shape). known: for each original, the fields of its row that do not
        depend on `measured`. pair: path of the pairs' files, without the suffix that tells the originals apart. whole: whether
        the case has several observations.
        """
        claimed_rounds = measured.reconstruction.list_rounds()
        for i, (example, candidate, fields) in enumerate(zip(examples, measured.assigned, measured.fields, strict=True)):
            links = make_link_fields(example, None if candidate is None else claimed_rounds[candidate])
            common = {**known[i], "surplus": measured.surplus, **links}
            if candidate is None or fields is None:
                (missing,) = self._score_missing(truth[i : i + 1], common["state"], REASON_UNMATCHED)
                yield ScoreRow(**common, **missing)
                continue
            place = f"{example.rounds[0]}-" if whole else ""
            path = pair.with_name(f"{pair.name}-{place}{example.batch}-{example.position}")
            yield ScoreRow(
                **common,
                **fields,
                label_recovered_name=self._name_class(fields["label_recovered"]),
                pair=self._write_pair(path, truth[i], measured.x[candidate]),
            )

    def _score_missing(self, truth: Tensor, state: CaseState, reason: str) -> list[dict[str, Any]]:
        """Return the measures of each of N originals `truth` (N, *shape) that has no reconstruction.

        They are those of `make_missing_measures`, and `constant`: a dict from names in `FILLED_SCORES` to the scores of
        `Gallery.constant` as reconstruction, a constant image or mean table row, which counts in place of the missing one. Scores
        that cannot be computed are left out.
        """
        common = make_missing_measures(state, reason, self.data.spec, self.tagger)
        measured = measure(self.gallery.repeat_constant(len(truth)), truth, self.data.spec, self.lpips)
        return [{**common, "constant": {name: row[name] for name in FILLED if row[name] is not None}} for row in measured]

    def _name_class(self, label: int) -> str:
        return self.data.class_names[label] if 0 <= label < len(self.data.class_names) else str(label)

    def _write_pair(self, path: Path, truth: Tensor, x: Tensor) -> str:
        """Write original and reconstruction side by side as PNG, or as JSON for table rows.

        Return the path relative to the run. path: without suffix, which is added.
        """
        if self.data.spec.is_image:
            path = path.with_name(path.name + ".png")
            pixels = (torch.cat([truth, x], dim=2) * 255).round().to(torch.uint8).numpy()
            image, content = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)), BytesIO()
            image.save(content, format="PNG")
            write_bytes(path, content.getvalue(), below=self.run, settle=False)
        else:
            path = path.with_name(path.name + ".json")
            columns = [column.name for column in self.data.spec.columns]
            row = {"columns": columns, "original": truth.tolist(), "reconstruction": x.tolist()}
            write_bytes(path, json.dumps(row).encode(), below=self.run, settle=False)
        return str(path.relative_to(self.run))


def _select_cases(cases: Sequence[dict[str, Any]], only: Container[str] | None) -> list[dict[str, Any]]:
    """Return the cases to score: those in `only` (None for all), and with a case of several rounds all of its client."""
    if only is None:
        return list(cases)
    clients = {case["client"] for case in cases if "rounds" in case and case["key"] in only}
    return [case for case in cases if case["key"] in only or ("rounds" in case and case["client"] in clients)]


def _make_shared_fields(folder: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a dict of the fields that all rows of an attack share."""
    return {
        "run": metadata["run"]["name"],
        "source": folder.name,
        **{key: metadata[key] for key in ("attack", "spec", "null", "knows_defense", "seed")},
        "oracles": tuple(metadata["oracles"]),
        "withheld": tuple(metadata.get("withheld", ())),
        **{key: metadata.get(key, "") for key in ("network_code", "attack_code")},
        **{key: metadata["run"][key] for key in RUN_FIELDS},
        "ranges_from": metadata["run"].get("ranges_from", ""),
        "limits": tuple(metadata["run"].get("limits", ())),
        "threat": classify_threat(metadata["run"], metadata["spec"], metadata["oracles"]),
        "concessions": list_concessions(metadata["run"]),
    }


def _make_case_fields(case: dict[str, Any], reconstruction: Reconstruction | None, state: CaseState) -> dict[str, Any]:
    """Return a dict of the fields that all rows of a case share, without those that all rows of its attack share."""
    return {
        "case": case["key"],
        "state": state,
        "client": case["client"],
        "environment": describe_environment(),
        "codec": case.get("codec"),
        "rounded": case.get("codec") == "weights",
        **{name: getattr(reconstruction, name, None) for name in (*EFFORT_FIELDS, "notes")},
    }


def _read_epochs(metadata: dict[str, Any]) -> int:
    """Return the number of epochs per round from the content of `attack.json`; 1 if clients train for a number of steps."""
    return metadata["run"].get("training", {}).get("epochs") or 1


def make_missing_measures(state: CaseState, reason: str, spec: DataSpec, tagger: semantic.Tagger | str) -> dict[str, Any]:
    """Return the measures of an example without a reconstruction: `make_empty_measures`, `label_success`, and those of tags.

    `success` and `label_success` are False, as is `exact_match` for table rows, and `failure` is `reason`. With a tagger,
    `tag_jaccard` is 0, as if the reconstruction had no tag. If the case is waiting, these five fields are None.
    spec: of the data. tagger: a text tells why there is none.
    """
    measures: dict[str, Any] = {**make_empty_measures(reason, spec), "label_success": False}
    if isinstance(tagger, str):
        measures["tag_reason"] = tagger
    else:
        measures |= {"tag_reason": "no reconstruction", "tag_jaccard": 0.0, "tagger": tagger.name}
    if state == "waiting":
        measures |= dict.fromkeys(("success", "label_success", "exact_match", "failure", "tag_jaccard"))
    return measures
