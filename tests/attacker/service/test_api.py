"""Tests of the API on a federation's run: recordings, attacks, cases, scores and jobs, with and without true examples."""

import asyncio
import errno
import io
import json
import os
import shutil
import sys
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from attacker.reconstruction import Reconstruction
from attacker.replay.results import write_failure
from attacker.report.gather import gather_run
from attacker.report.pairs import read_pair
from attacker.report.render import render
from attacker.scoring import Scorer, read_rows, summarise
from attacker.scoring.row_pairs import PSNR_OF_8_BITS
from attacker.service.jobs.job import JobSpec
from attacker.service.worker import report_process as reporting
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines

Ask = Callable[..., Any]
RUN = "recordings/digits"


@pytest.fixture
def sources(root: Path) -> tuple[str, str]:
    """Names of the attack's folder and of its null's."""
    names = sorted(path.name for path in (root / "digits" / "reconstructions").iterdir())
    attack, null = sorted(names, key=lambda name: "null" in name)
    return attack, null


def read_pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)), dtype=int)


def test_recording_is_described_by_manifest_and_index(ask: Ask) -> None:
    (answer_json,) = ask().json("recordings")["items"]
    assert answer_json["id"] == "digits"
    assert answer_json["model"] == "lenet_dlg"
    assert answer_json["data"] == {"shape": [1, 8, 8], "num_classes": 10, "is_image": True}
    assert (answer_json["rounds"], answer_json["last_round"], answer_json["clients"], answer_json["observations"]) == (2, 2, 3, 6)
    assert answer_json["trouble"] == []


def test_observations_are_listed_in_pages(ask: Ask, root: Path) -> None:
    rows = Recording(root / "digits" / "recording").read_rows()
    asked, found, after = ask(), [], None
    while True:
        page = asked.json(f"{RUN}/observations", params={"limit": 4, **({"after": after} if after else {})})
        found += page["items"]
        if (after := page["next"]) is None:
            break
    assert [(one["round"], one["client"], one["bytes"]) for one in found] == [(r.round, r.client, r.bytes) for r in rows]


def test_client_is_selected_by_a_unique_prefix(ask: Ask, root: Path) -> None:
    names = Recording(root / "digits" / "recording").list_clients()
    client = names[0]
    length = next(n for n in range(1, 99) if sum(name.startswith(client[:n]) for name in names) == 1)
    asked = ask()
    for path in (f"{RUN}/observations", f"{RUN}/cases"):
        whole, short = (asked.json(path, params={"client": given})["items"] for given in (client, client[:length]))
        assert whole == short != []
        assert asked.json(path, params={"client": f"{client}x"})["items"] == []


def test_observations_are_filtered(ask: Ask, root: Path) -> None:
    client = Recording(root / "digits" / "recording").list_clients()[1]
    asked = ask()
    found = asked.json(f"{RUN}/observations", params={"client": client, "round": 2})["items"]
    assert [(one["round"], one["client"]) for one in found] == [(2, client)]
    assert asked.json(f"{RUN}/observations", params={"status": "failed"})["items"] == []


def test_success_is_of_finished_cases_and_others_are_counted(ask: Ask, root: Path, sources: tuple[str, str]) -> None:
    folder = root / "digits" / "reconstructions" / sources[0]
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths[:3]:
        path.unlink()
    replace(Reconstruction.read(paths[3]), interrupted=True, notes=("cut off",)).write(paths[3])
    Scorer(root / "digits", [root / "digits" / "truth"]).score(folder)
    asked = ask(truth="own")
    answer_json = next(one for one in asked.json(f"{RUN}/attacks")["items"] if one["source"] == sources[0])
    counts = {key: answer_json[key] for key in ("cases", "done", "failed", "interrupted", "waiting", "scored", "examples")}
    assert list(counts.values()) == [6, 2, 0, 1, 3, 2, 2]
    assert answer_json["success"] == 1
    cases = {one["case"]: one for one in asked.json(f"{RUN}/cases", params={"attack": sources[0]})["items"]}
    assert [cases[path.stem]["status"] for path in paths] == ["waiting"] * 3 + ["interrupted"] + ["done"] * 2
    assert [cases[path.stem]["success"] for path in paths] == [None] * 4 + [1, 1]
    states = [one["state"] for one in asked.json(f"{RUN}/grid", params={"attack": sources[0]})["cells"]]
    assert sorted(states) == ["done", "done", "interrupted", "waiting", "waiting", "waiting"]
    (waiting,) = [asked.json(f"{RUN}/cases/{sources[0]}/{path.stem}") for path in paths[:1]]
    assert (waiting["examples"], waiting["status"]) == ([], "waiting")


def test_failed_and_waiting_cases_count_as_in_the_report(ask: Ask, root: Path, sources: tuple[str, str]) -> None:
    """One case failed, another was not attacked yet, and the null lacks a third: shares, means and verdicts stay equal."""
    run = root / "digits"
    attack, null = (run / "reconstructions" / name for name in sources)
    failed, waiting, unguessed, *_ = sorted(attack.glob("*.safetensors"))
    failed.unlink()
    write_failure(attack, failed.stem, "no memory")
    waiting.unlink()
    (null / unguessed.name).unlink()
    scorer = Scorer(run, [run / "truth"])
    for folder in (attack, null):
        scorer.score(folder)
    asked = ask(truth="own")
    attacks = {one["source"]: one for one in asked.json(f"{RUN}/attacks")["items"]}
    headline = asked.json(f"{RUN}/headline")
    (summary,) = summarise(read_rows(run / "scores.jsonl"))
    for one, name in ((summary, attack.name), (summary.null, null.name)):
        assert attacks[name]["examples"] == one.success.count
        assert attacks[name]["success"] == pytest.approx(one.success.value)
        assert attacks[name]["labels"] == pytest.approx(one.label_success.value)
        assert attacks[name]["psnr"] == pytest.approx(one.psnr.value)
    assert (attacks[attack.name]["outcome"], attacks[attack.name]["verdict"]) == (summary.verdict.outcome, summary.verdict.words)
    assert headline["psnr"] == pytest.approx(summary.psnr.value)
    assert headline["null_psnr"] == pytest.approx(summary.null.psnr.value)
    assert attacks[null.name]["scored"] == 5


def test_grid_cells_have_the_success_of_their_observation(ask: Ask, root: Path, sources: tuple[str, str]) -> None:
    grid = ask(truth="own").json(f"{RUN}/grid")
    rows = {(row["case"]): row for row in read_json_lines(root / "digits" / "scores.jsonl") if row["source"] == sources[0]}
    assert (len(grid["clients"]), grid["rounds"], len(grid["cells"])) == (3, [1, 2], 6)
    for cell in grid["cells"]:
        row = rows[f"{cell['round']:05d}-{cell['client']}"]
        assert cell["cases"] == [row["case"]]
        assert (cell["leak"], cell["state"], cell["attack"]) == (float(row["success"]), "done", sources[0])
        assert cell["psnr"] == pytest.approx(min(row["psnr"], PSNR_OF_8_BITS))


def test_grid_cells_without_true_examples_have_the_confidence(ask: Ask, root: Path, sources: tuple[str, str]) -> None:
    cells = ask().json(f"{RUN}/grid")["cells"]
    assert cells
    for cell in cells:
        found = Reconstruction.read(root / "digits" / "reconstructions" / sources[0] / f"{cell['cases'][0]}.safetensors")
        assert cell["leak"] == pytest.approx(float(found.confidence.nanmean()))
        assert cell["success"] is cell["psnr"] is None


def test_grid_can_be_restricted_to_one_attack(ask: Ask, sources: tuple[str, str]) -> None:
    cells = ask(truth="own").json(f"{RUN}/grid", params={"attack": sources[1]})["cells"]
    assert {cell["attack"] for cell in cells} == {sources[1]}
    assert all(cell["leak"] < 1 for cell in cells)


def test_case_has_its_examples_and_originals(ask: Ask, root: Path, sources: tuple[str, str]) -> None:
    asked = ask(truth="own")
    case = asked.json(f"{RUN}/cases", params={"attack": sources[0], "limit": 1})["items"][0]
    answer_json = asked.json(f"{RUN}/cases/{sources[0]}/{case['case']}")
    (example,) = answer_json["examples"]
    row = next(
        r for r in read_json_lines(root / "digits" / "scores.jsonl") if (r["source"], r["case"]) == (sources[0], case["case"])
    )
    assert (example["success"], example["label_true"]) == (row["success"], row["label_true_name"])
    image, original = (read_pixels(asked(example[key]).content) for key in ("image", "original"))
    both = np.asarray(Image.open(root / "digits" / row["pair"]), dtype=int)
    assert (np.concatenate([original, image], axis=1) == both).all()


def test_without_true_examples_no_scores_originals_or_labels_are_served(ask: Ask, sources: tuple[str, str]) -> None:
    asked = ask()
    case = asked.json(f"{RUN}/cases", params={"attack": sources[0], "limit": 1})["items"][0]
    answer_json = asked.json(f"{RUN}/cases/{sources[0]}/{case['case']}")
    for example in answer_json["examples"]:
        secret = ("original", "label_true", "success", "psnr", "ssim", "lpips", "failure")
        assert [example[key] for key in secret] == [None] * len(secret)
    assert (case["success"], case["psnr"]) == (None, None)
    assert all(one["success"] is one["psnr"] is None for one in asked.json(f"{RUN}/leakage")["items"])
    assert all(one["scored"] == 0 for one in asked.json(f"{RUN}/attacks")["items"])
    address = f"/api/v1/{RUN}/cases/{sources[0]}/{case['case']}"
    assert [asked(f"{address}/{kind}/0.png").status_code for kind in ("originals", "pairs")] == [404, 404]


def test_images_of_a_repeated_case_have_new_urls(ask: Ask, root: Path, sources: tuple[str, str]) -> None:
    """Browsers cache images by URL."""
    asked = ask()
    case = asked.json(f"{RUN}/cases?attack={sources[0]}")["items"][0]["case"]
    (before,) = asked.json(f"{RUN}/cases/{sources[0]}/{case}")["examples"]
    asked.scan()
    assert asked.json(f"{RUN}/cases/{sources[0]}/{case}")["examples"] == [before]
    path = root / "digits" / "reconstructions" / sources[0] / f"{case}.safetensors"
    found = Reconstruction.read(path)
    replace(found, x=1 - found.x).write(path)
    asked.scan()
    (after,) = asked.json(f"{RUN}/cases/{sources[0]}/{case}")["examples"]
    assert after["image"] != before["image"]
    assert asked(after["image"]).content == asked(before["image"]).content


def test_report_without_disk_space_is_a_server_error(
    ask: Ask, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(reporting, "write_bytes", full)
        with pytest.raises(SystemExit) as ended:
            reporting.main(str(root / "digits"), str(tmp_path / "out.html"))
    program = f"import sys; sys.exit((print({capsys.readouterr().err!r}, file=sys.stderr), {ended.value.code})[1])"
    real = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", lambda *_, **how: real(sys.executable, "-c", program, **how))
    answer = ask()(f"/api/v1/{RUN}/report")
    assert answer.status_code == 507
    assert "No space left on device; free disk space there" in answer.json()["error"]["message"]


def test_report_without_true_examples_has_no_scores_or_originals(ask: Ask, root: Path) -> None:
    row = read_json_lines(root / "digits" / "scores.jsonl")[0]
    path = root / "digits" / row["pair"]
    Image.fromarray(np.indices((8, 16)).sum(axis=0).astype(np.uint8)).save(path)  # a pattern that no reconstruction resembles
    original = read_pair(root / "digits", row["pair"], ()).original
    secrets = (f">{row['psnr']:.1f} dB<", b64encode(original.png).decode())
    whole = render([gather_run(root / "digits")])
    assert all(secret in whole for secret in secrets)
    report = ask()(f"/api/v1/{RUN}/report")
    assert report.status_code == 200
    assert not any(secret in report.text for secret in secrets)
    assert report.text.count("data:image/png") >= 6
    assert "sandbox" in report.headers["content-security-policy"]


def test_reconstruction_is_served_as_in_its_file(ask: Ask, root: Path, sources: tuple[str, str]) -> None:
    asked = ask()
    case = asked.json(f"{RUN}/cases", params={"attack": sources[0], "limit": 1})["items"][0]["case"]
    found = Reconstruction.read(root / "digits" / "reconstructions" / sources[0] / f"{case}.safetensors")
    answer_json = asked.json(f"{RUN}/cases/{sources[0]}/{case}")
    shown = read_pixels(asked(answer_json["examples"][0]["image"]).content)
    assert (shown == (found.x[0, 0].clamp(0, 1) * 255).round().numpy()).all()
    assert answer_json["loss"][-1] == [len(found.loss), pytest.approx(float(found.loss[-1]))]
    assert asked(f"/api/v1/{RUN}/cases/{sources[0]}/{case}/images/7.png").status_code == 404


def test_leakage_by_round_includes_the_null(ask: Ask, sources: tuple[str, str]) -> None:
    answer_json = ask(truth="own").json(f"{RUN}/leakage")["items"]
    assert [(one["attack"], one["null"], one["round"]) for one in answer_json] == [
        (name, name == sources[1], number) for name in sorted(sources) for number in (1, 2)
    ]
    assert {one["examples"] for one in answer_json} == {3}


def test_training_is_served_from_metrics(ask: Ask, root: Path) -> None:
    assert ask().json(f"{RUN}/training")["items"] == read_json_lines(root / "digits" / "metrics.jsonl")


def test_etag_is_valid_until_files_change(ask: Ask, root: Path) -> None:
    asked = ask()
    first = asked(f"/api/v1/{RUN}/grid")
    tag = {"If-None-Match": first.headers["etag"]}
    assert asked(f"/api/v1/{RUN}/grid", headers=tag).status_code == 304
    shutil.rmtree(root / "digits" / "reconstructions")
    asked.scan()
    later = asked(f"/api/v1/{RUN}/grid", headers=tag)
    assert later.status_code == 200
    assert {cell["state"] for cell in later.json()["cells"]} == {"none"}


def submit(asked: Any, **spec: Any) -> Any:
    return asked("/api/v1/jobs", "POST", json={"recording": "digits", "attack": "cpl", **spec})


def test_job_is_submitted_listed_cancelled_and_retried(ask: Ask) -> None:
    asked = ask()
    first = submit(asked, arguments={"steps": 3}, rounds="1")
    assert first.status_code == 201
    address = first.headers["location"]
    assert asked(address).json() == first.json()
    second = submit(asked).json()
    listed = asked.json("jobs", params={"limit": 1})
    assert [one["id"] for one in listed["items"]] == [second["id"]]
    assert [one["id"] for one in asked.json("jobs", params={"after": listed["next"]})["items"]] == [first.json()["id"]]
    assert asked(f"{address}/cancel", "POST", json={}).json()["state"] == "cancelled"
    again = asked(f"{address}/cancel", "POST", json={})
    assert again.status_code == 409
    assert "cancelled" in again.json()["error"]["message"]
    assert asked(f"{address}/retry", "POST", json={}).json()["state"] == "queued"
    assert len(asked.json("jobs", params={"state": "queued"})["items"]) == 2


@pytest.mark.parametrize(
    ("wrong", "field", "known"),
    [
        ({"recording": "nothing"}, "spec.recording", "digits"),
        ({"attack": "cpx"}, "spec.attack", "cpl"),
        ({"arguments": {"steps": -1}}, "spec.arguments.steps", "steps"),
        ({"rounds": "9-12"}, "spec.rounds", None),
        ({"clients": ["nobody"]}, "spec.clients", None),
        ({"seed": "x"}, "spec.seed", None),
        ({"priority": 99}, "spec.priority", None),
        ({"model": "os:system"}, "spec.model", "attack"),
    ],
)
def test_invalid_job_is_refused_with_its_field(ask: Ask, wrong: dict, field: str, known: str | None) -> None:
    asked = ask()
    answer = submit(asked, **wrong)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["field"] == field
    assert known is None or known in error["known"]
    value = next(iter(wrong.values()))
    assert not isinstance(value, str | int) or field == "spec.model" or str(value) in error["message"]
    assert asked.json("jobs")["items"] == []


def test_a_request_without_a_body_is_refused_with_what_is_needed(ask: Ask) -> None:
    answer = ask()("/api/v1/jobs", "POST", content="null", headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "a JSON object as the body of the request is needed"


def test_full_queue_refuses_jobs(ask: Ask) -> None:
    asked = ask(max_queued=1)
    assert [submit(asked).status_code for _ in range(2)] == [201, 429]


@pytest.mark.parametrize("path", ["jobs/0123456789abcdef", "jobs/x/preview", "recordings/x", f"{RUN}/cases/x/y", "nothing"])
def test_unknown_paths_have_an_error_message(ask: Ask, path: str) -> None:
    answer = ask()(f"/api/v1/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


def test_unknown_query_parameter_is_refused(ask: Ask) -> None:
    error = ask()(f"/api/v1/{RUN}/observations?cient=x").json()["error"]
    assert error["field"] == "cient"
    assert "client" in error["known"]


def test_metrics_count_requests_by_route_and_jobs_by_state(ask: Ask) -> None:
    asked = ask()
    asked.components.queue.submit(JobSpec(recording="digits", attack="cpl"))
    asked(f"/api/v1/{RUN}/grid")
    asked("/api/v1/recordings/secret-name")
    answer_json = asked("/metrics").text
    assert 'fedleak_requests_total{method="GET",route="/api/v1/recordings/{id}/grid",status="200"} 1.0' in answer_json
    assert 'fedleak_jobs{state="queued"} 1.0' in answer_json
    assert "fedleak_observations 6.0" in answer_json
    assert "secret-name" not in answer_json


def test_attacks_are_listed_with_their_defaults(ask: Ask) -> None:
    answer_json = {one["name"]: one for one in ask().json("attacks")["items"]}
    assert answer_json["cpl"]["arguments"]["steps"] > 0
    assert "num_examples" in answer_json["agic"]["needs"]


def test_rows_with_nan_are_left_out(ask: Ask, root: Path) -> None:
    path = root / "digits" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"round": 3, "loss": NaN}\n{"round": 4, "loss": 1.0}\n')
    asked = ask()
    asked.scan()
    assert [row["round"] for row in asked.json(f"{RUN}/training")["items"]] == [0, 1, 2, 4]
    assert asked.json(RUN)["trouble"] == ["metrics.jsonl: 1 line cannot be read"]
    assert json.loads(asked(f"/api/v1/{RUN}/training").text)
