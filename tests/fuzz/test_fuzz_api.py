"""Tests of the API with a few seconds of its fuzzer (nightly runs take minutes), and of the fuzzer itself."""

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
def test_the_fuzzer_detects_each_kind_of_wrong_answer(answer: httpx.Response) -> None:
    with pytest.raises(AssertionError):
        api_fuzzer._check({}, answer)


def test_a_write_outside_the_root_is_detected(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="outside the root"), api_fuzzer.outside_of(tmp_path) as outside:
        outside.write_text("changed")


def test_a_seed_gives_the_same_requests() -> None:
    ids = {"recording": ["a"], "source": ["b"], "case": ["c"], "job": ["d"]}
    one, two = (api_fuzzer.Grammar(random.Random(3), Path("/x"), ids) for _ in range(2))
    assert [repr(one.request()) for _ in range(200)] == [repr(two.request()) for _ in range(200)]
