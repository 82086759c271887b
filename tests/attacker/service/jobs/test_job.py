"""Tests of the validation of job requests and results."""

import pytest
from pydantic import ValidationError

from attacker.service.jobs.job import JobSpec, ReplaySummary, Result

RESULT = Result(attacks=(ReplaySummary(source="cpl-0011aabb", null=False, done=2, skipped=0, routes={"optimisation": 2}),))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"recording": "../etc"}, "recording"),
        ({"recording": "a~.."}, "recording"),
        ({"recording": ".attacker"}, "recording"),
        ({"recording": "a~b~c~d"}, "recording"),
        ({"recording": "photos\n"}, "recording"),
        ({"attack": "os:system"}, "code that is not part of this project"),
        ({"attack": "cplx"}, "Did you mean 'cpl'"),
        ({"arguments": {"stepz": 3}}, "stepz"),
        ({"arguments": {"restarts": 0}}, "above 0"),
        ({"arguments": {"restarts": True}}, "above 0"),
        ({"rounds": "0"}, "counted from 1"),
        ({"rounds": "1-99999999999"}, "rounds"),
        ({"clients": ["../x"]}, "not a valid client name"),
        ({"clients": "ab"}, "clients"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed"),
        ({"priority": 11}, "priority"),
        ({"priorty": 1}, "priorty"),
    ],
)
def test_invalid_job_specifications_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        JobSpec.model_validate({"recording": "photos", "attack": "cpl", **wrong})


def test_invalid_results_are_refused() -> None:
    good = RESULT.model_dump(mode="json")
    assert Result.model_validate(good) == RESULT
    for wrong in ({"source": "../../etc"}, {"source": "a/b"}, {"done": -1}, {"more": 1}):
        with pytest.raises(ValidationError):
            Result.model_validate({"attacks": [{**good["attacks"][0], **wrong}]})
