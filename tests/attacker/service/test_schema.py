"""Tests with requests generated from the OpenAPI document: answers agree with it, and none is a server error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import positive_data_acceptance

from attacker.service.jobs.job import JobSpec

ENDLESS = "/events$"
SLOW = "/report$"
GENERATED = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def narrow(document: dict[str, Any], root: Path, job: str) -> None:
    """Restrict names in the document to existing ones and one unknown, since random names would hardly ever exist."""
    sources = sorted(path.name for path in (root / "digits" / "reconstructions").iterdir())
    case = sorted(path.stem for path in (root / "digits" / "reconstructions" / sources[0]).glob("*.safetensors"))[0]
    names = {"source": [*sources, "none"], "attack": [*sources, "none"], "case": [case, "none"], "n": [0, 1]}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                known = names.get(parameter["name"])
                if parameter["name"] == "id":
                    known = [job, "none"] if "/jobs/" in path else ["digits", "none"]
                if known is not None:
                    parameter["schema"] = {"enum": known}
    fields = document["components"]["schemas"]["JobSpec"]["properties"]
    fields["recording"] = {"enum": ["digits", "none"]}
    fields["attack"] = {"enum": ["cpl", "exact", "none"]}


@pytest.fixture
def document(ask: Callable[..., Any], root: Path) -> BaseSchema:
    asked = ask(truth="own", max_queued=10, max_body=2**24)  # requests are judged by their fields, not by their size
    job = asked.components.queue.submit(JobSpec(recording="digits", attack="cpl"))
    narrow(asked.app.openapi(), root, job.id)

    async def by_its_name(scope: Any, receive: Any, send: Any) -> None:
        headers = [(name, b"localhost" if name == b"host" else value) for name, value in scope.get("headers", ())]
        await asked.app({**scope, "headers": headers}, receive, send)

    return schemathesis.openapi.from_asgi("/api/v1/openapi.json", by_its_name)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_agree_with_the_document(document: BaseSchema, mode: GenerationMode) -> None:
    """In negative mode, requests violate the document and must be refused."""
    asked = 0
    for found in document.exclude(path_regex=f"{ENDLESS}|{SLOW}").get_all_operations():
        try:
            _check(found.ok().as_strategy(generation_mode=mode))
            asked += 1
        except Unsatisfiable:  # the operation has nothing that could be violated
            continue
    assert asked > 10


def _check(cases: Any) -> None:
    @GENERATED
    @given(case=cases)
    def check(case: Any) -> None:
        # the document does not list names and arguments, so that well-formed requests may be refused as well
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()
