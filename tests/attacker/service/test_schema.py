"""Requests made up from the OpenAPI document: every answer is as the document says, and none is a mistake of the service."""

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
MADE_UP = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def narrow(document: dict[str, Any], root: Path, job: str) -> None:
    """Names in the document that there are, beside one that there is not: made-up ones would hardly ever hit."""
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
    asked = ask(truth="own", max_queued=10)
    job = asked.parts.queue.submit(JobSpec(recording="digits", attack="cpl"))
    narrow(asked.app.openapi(), root, job.id)

    async def by_its_name(scope: Any, receive: Any, send: Any) -> None:
        headers = [(name, b"localhost" if name == b"host" else value) for name, value in scope.get("headers", ())]
        await asked.app({**scope, "headers": headers}, receive, send)

    return schemathesis.openapi.from_asgi("/api/v1/openapi.json", by_its_name)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_every_answer_is_as_the_document_says(document: BaseSchema, mode: GenerationMode) -> None:
    """In negative mode requests break what the document demands, and are to be refused."""
    asked = 0
    for found in document.exclude(path_regex=f"{ENDLESS}|{SLOW}").get_all_operations():
        try:
            _check(found.ok().as_strategy(generation_mode=mode))
            asked += 1
        except Unsatisfiable:  # nothing in it that could be broken
            continue
    assert asked > 10


def _check(cases: Any) -> None:
    @MADE_UP
    @given(case=cases)
    def check(case: Any) -> None:
        # no document tells which names and arguments there are: what is well-formed may be refused, too
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()
