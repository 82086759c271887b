"""Seconds of the API's fuzzer; a nightly run takes minutes."""

import json
import random
from pathlib import Path

import api_fuzzer
import httpx
import pytest

SECONDS = 5.0


def test_no_request_breaks_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    found = api_fuzzer.fuzz(SECONDS, seed=1)
    with capsys.disabled():
        print(f"\nAPI fuzzer: {json.dumps(found)}")
    assert found["requests"] > 50
    assert {"200", "404", "422"} <= set(found["statuses"]), "it reaches what lies behind the first checks"


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(500, headers=api_fuzzer.SECURITY_HEADERS),
        httpx.Response(200),
        httpx.Response(200, headers=api_fuzzer.SECURITY_HEADERS, text=f"a {api_fuzzer.SECRET} b"),
        httpx.Response(404, headers=api_fuzzer.SECURITY_HEADERS, json={"error": {"message": ""}}),
    ],
)
def test_the_fuzzer_finds_what_it_looks_for(answer: httpx.Response) -> None:
    with pytest.raises(AssertionError):
        api_fuzzer._check({}, answer)


def test_what_is_written_outside_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="outside the root"), api_fuzzer.outside_of(tmp_path) as outside:
        outside.write_text("changed")


def test_a_seed_gives_the_same_requests() -> None:
    ids = {"recording": ["a"], "source": ["b"], "case": ["c"], "job": ["d"]}
    one, two = (api_fuzzer.Grammar(random.Random(3), Path("/x"), ids) for _ in range(2))
    assert [repr(one.request()) for _ in range(200)] == [repr(two.request()) for _ in range(200)]
