"""Fuzz tests of the service with damaged files of a run: it never fails with a server error, and reveals no paths."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from damage import harm
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attacker.service.http.app import make_components
from attacker.service.http.caching import ResponseCache
from attacker.service.index import Catalogue
from attacker.service.settings import ServiceSettings

FUZZ = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.generate],  # without shrinking, which takes minutes as each example copies a run
    max_examples=25,
)
Fresh = Callable[[], Path]
FILES = (
    "recording/manifest.json",
    "recording/index.sqlite",
    "metrics.jsonl",
    "scores.jsonl",
    "reconstructions/{source}/attack.json",
    "reconstructions/{source}/{case}.safetensors",
    "pairs/{source}/{case}-1-0.png",
)
JSON_FILES = FILES[0:1] + FILES[2:5]
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["../../../etc/passwd", "pairs/../../../../etc/passwd", "/etc/passwd", "sum", "", 2**70, -1, 1e308]),
    st.lists(st.integers(), max_size=3),
    st.just({}),
)


@pytest.fixture
def make_root(federated: Path, tmp_path: Path) -> Fresh:
    """Function that replaces the root by one with an undamaged copy of the run."""

    def make() -> Path:
        shutil.rmtree(tmp_path / "root", ignore_errors=True)
        shutil.copytree(federated, tmp_path / "root" / "digits")
        return tmp_path / "root"

    return make


def named(root: Path, file: str) -> Path:
    source = next((root / "digits" / "reconstructions").glob("exact-[!n]*"))
    case = sorted(path.stem for path in source.glob("*.safetensors"))[0]
    return root / "digits" / file.format(source=source.name, case=case)


Check = Callable[[Path], None]


@pytest.fixture
def check(application: FastAPI, tmp_path: Path) -> Iterator[Check]:
    """Function that asserts that all routes of the run answer with status 200 or 404, and valid JSON."""
    components = make_components(ServiceSettings(root=tmp_path, state=tmp_path / "state", workers=0, truth="own", token=False))

    def look_again(root: Path) -> None:
        application.state.components = replace(
            components, catalogue=Catalogue(replace(components.settings, root=root)), replies=ResponseCache()
        )
        application.state.components.catalogue.scan()
        request_all_routes(application, root)

    yield look_again
    components.queue.close()


def request_all_routes(app: FastAPI, root: Path) -> None:
    source = next((root / "digits" / "reconstructions").glob("exact-[!n]*"))
    cases = [f"cases/{source.name}/{path.stem}" for path in sorted(source.glob("*.safetensors"))[:2]]
    images = [f"{case}/{kind}/0.png" for case in cases for kind in ("images", "pairs", "originals")]
    ask = [
        "",
        "/observations",
        "/training",
        "/attacks",
        "/grid",
        "/leakage",
        "/cases",
        *(f"/{name}" for name in (*cases, *images)),
    ]

    async def answers() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = [await client.get("/api/v1/recordings")]
            return found + [await client.get(f"/api/v1/recordings/digits{path}") for path in ask]

    for answer in asyncio.run(answers()):
        assert answer.status_code in (200, 404), (answer.url, answer.text[:300])
        assert "root:" not in answer.text
        assert str(root) not in answer.text
        if answer.headers["content-type"] == "application/json":
            answer.json()


@FUZZ
@given(file=st.sampled_from(FILES), harmed=harm())
def test_changed_bytes_cause_no_server_error(make_root: Fresh, check: Check, file: str, harmed: Callable[[bytes], bytes]) -> None:
    root = make_root()
    path = named(root, file)
    path.write_bytes(harmed(path.read_bytes()))
    check(root)


def replaced(value: Any, choose: Callable[[int], int], odd: Any) -> Any:
    """Return a copy of JSON in which one value, at any depth, is replaced by `odd`."""
    if isinstance(value, dict) and value:
        keys = list(value)
        key = keys[choose(len(keys))]
        return {**value, key: replaced(value[key], choose, odd)}
    if isinstance(value, list) and value:
        at = choose(len(value))
        return [*value[:at], replaced(value[at], choose, odd), *value[at + 1 :]]
    return odd


@FUZZ
@given(file=st.sampled_from(JSON_FILES), places=st.lists(st.integers(0, 10**6), min_size=8, max_size=8), odd=ODD)
def test_changed_json_values_cause_no_server_error(
    make_root: Fresh, check: Check, file: str, places: list[int], odd: Any
) -> None:
    root = make_root()
    path = named(root, file)
    left = iter(places * 3)
    lines = path.read_text().splitlines() if file.endswith("l") else [path.read_text()]
    lines[0] = json.dumps(replaced(json.loads(lines[0]), lambda count: next(left) % count, odd))
    path.write_text("\n".join(lines) + "\n")
    check(root)


@FUZZ
@given(places=st.lists(st.integers(0, 10**6), min_size=8, max_size=8), odd=ODD, facts=st.booleans())
def test_changed_facts_of_a_reconstruction_cause_no_server_error(
    make_root: Fresh, check: Check, places: list[int], odd: Any, facts: bool
) -> None:
    root = make_root()
    path = named(root, FILES[5])
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    left = iter(places * 3)
    if facts:
        changed_facts = replaced(json.loads(header["__metadata__"]["facts"]), lambda count: next(left) % count, odd)
        header["__metadata__"]["facts"] = json.dumps(changed_facts)
    else:
        header = replaced(header, lambda count: next(left) % count, odd)
    described = json.dumps(header).encode()
    path.write_bytes(len(described).to_bytes(8, "little") + described + content[8 + length :])
    check(root)
