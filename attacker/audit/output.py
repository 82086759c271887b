"""Output of an audit: a page, JSON, SARIF and JUnit."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from attacker.attacks.confidence import MIN_LIKELY
from attacker.audit.attack_findings import NO_ANSWER
from attacker.audit.audit import Audit
from attacker.audit.findings import GRADES, Grade
from attacker.audit.what_if import describe_change
from attacker.report.pairs import read_pair
from attacker.report.templates import make_environment
from fedsim.recording import Recording
from fedsim.recording.files import write_bytes
from fedsim.recording.safe_files import read_bytes

GRADE_MEANINGS: dict[Grade, str] = {
    "none found": "No check failed. No attack did significantly better than guessing or, where the true examples were not given, "
    "was confident of a reconstruction. This is no proof of safety: other attacks, or attacks on other rounds or data, may still "
    "succeed.",
    "low": "A setting makes attacks easier than they need to be, or is stated wrongly, so that attacks find less than they "
    "could. This finding alone is not a leak.",
    "moderate": "The server learns something about the data, such as labels (which may be diagnoses), or secure aggregation is "
    "weak. No single example was shown to leak.",
    "serious": "The server learns part of what a client's examples contain, or a promised protection does not hold.",
    "severe": "Whoever runs the server can reconstruct single training examples from what a client sends, or nothing protects "
    "them as declared: clients do not apply the declared defense, or the server changed the model to read examples.",
}
SARIF_LEVELS: dict[Grade, str] = {
    "none found": "none",
    "low": "note",
    "moderate": "warning",
    "serious": "error",
    "severe": "error",
}
"""Level of a grade in SARIF 2.1.0."""
MAX_PICTURE_BYTES = 10_000_000
SUFFIXES = (".html", ".json", ".sarif", ".xml")
"""Endings of the files to which `write` writes an audit."""


def render(audit: Audit, run: Path) -> str:
    """Return the audit as one HTML page, which holds its pictures. run: folder of the run, where the pictures are."""
    shown = [finding.picture for finding in audit.findings if finding.picture]
    return (
        make_environment("attacker.audit")
        .get_template("audit.html")
        .render(
            audit=audit,
            no_answer=NO_ANSWER,
            describe_change=describe_change,
            least_likely=MIN_LIKELY,
            meanings=GRADE_MEANINGS,
            grades=GRADES,
            pictures={file: read_bytes(run, file, limit=MAX_PICTURE_BYTES) for file in shown if not file.endswith(".json")},
            table_rows={
                file: read_pair(run, file, Recording(run / "recording").manifest.data.columns)
                for file in shown
                if file.endswith(".json")
            },
        )
    )


def write(audit: Audit, run: Path, path: Path) -> None:
    """Write an audit to a file in the format of its suffix: .html, .json, .sarif or .xml (JUnit).

    Raises ValueError for another suffix.
    """
    from json import dumps

    check_suffix(path)
    formats = {
        ".html": lambda: render(audit, run),
        ".json": lambda: dumps(audit.as_json(), indent=2) + "\n",
        ".sarif": lambda: dumps(to_sarif(audit), indent=2) + "\n",
        ".xml": lambda: to_junit(audit),
    }
    write_bytes(path, formats[path.suffix]().encode())


def check_suffix(path: Path) -> None:
    """Raise ValueError if `write` knows no format for the suffix of a file."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: unknown ending {path.suffix!r}. Write the audit to a file ending in {', '.join(SUFFIXES)}")


def to_sarif(audit: Audit) -> dict[str, Any]:
    """Return the findings as JSON values in the Static Analysis Results Interchange Format 2.1.0, which code hosts show.

    Attacks that failed on at least one update are notifications. An audit in which no attack reconstructed an update is an
    unsuccessful execution.
    """
    rules = {finding.rule: finding for finding in audit.findings}
    driver = {
        "name": "fedleak",
        "informationUri": "https://github.com/fedleak/fedleak",
        "rules": [{"id": rule, "shortDescription": {"text": finding.title}} for rule, finding in rules.items()],
    }
    results = [
        {
            "ruleId": finding.rule,
            "level": SARIF_LEVELS[finding.grade],
            "message": {"text": f"{finding.title} {finding.evidence} {finding.advice}"},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": "recording/manifest.json"}}}],
            "properties": {"grade": finding.grade},
        }
        for finding in audit.findings
    ]
    notifications = [("warning", f"{attack.spec} {attack.failure_words}") for attack in audit.attacks if attack.failed]
    if not audit.has_answer:
        notifications.append(("error", NO_ANSWER))
    invocation = {
        "executionSuccessful": audit.has_answer,
        "toolExecutionNotifications": [{"level": level, "message": {"text": text}} for level, text in notifications],
    }
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "invocations": [invocation], "results": results}],
    }


def to_junit(audit: Audit) -> str:
    """Return the audit as the XML text of a JUnit test suite.

    Each finding is a failed test, each check that passed a passed one, and each that was not made or decided nothing a skipped
    one. If no attack has an answer, there is one more test, with an error.
    """
    count = len(audit.findings) + len(audit.passed) + len(audit.not_checked) + (not audit.has_answer)
    suite = ElementTree.Element(
        "testsuite",
        name=f"fedleak audit of {audit.run}",
        tests=str(count),
        failures=str(len(audit.findings)),
        errors=str(int(not audit.has_answer)),
        skipped=str(len(audit.not_checked)),
        time=f"{audit.seconds:.1f}",
    )
    for finding in audit.findings:
        case = ElementTree.SubElement(suite, "testcase", classname="audit", name=finding.rule)
        ElementTree.SubElement(
            case, "failure", type=finding.grade, message=finding.title
        ).text = f"{finding.evidence} {finding.advice}"
    if not audit.has_answer:
        case = ElementTree.SubElement(suite, "testcase", classname="audit", name="attacks")
        ElementTree.SubElement(case, "error", message=NO_ANSWER)
    for passed in audit.passed:
        ElementTree.SubElement(suite, "testcase", classname="audit", name=passed.rule)
    for skipped in audit.not_checked:
        case = ElementTree.SubElement(suite, "testcase", classname="audit", name=skipped.rule)
        ElementTree.SubElement(case, "skipped", message=skipped.reason)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
