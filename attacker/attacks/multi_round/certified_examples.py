"""Examples that closed forms find and certify in single rounds of a client, before any search over its rounds.

To certify an answer is to check it, not to prove it. The checks: the answer's gradient differs from the observed one by at most a
thousandth of the norm, the answer has all examples of the round, the gradient and not a prior determines these examples, and the
confidence in them is high or undecided. See `ClosedForm.certify`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from attacker.attacks.base import Progress
from attacker.attacks.cases import Case
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.reconstruction import Reconstruction, Slot

DIRECT_ROUTES = ("linear", "layers", "peeled")
"""The closed forms that are tried: those of `exact` that do not iterate, and whose answers the gradient alone determines."""
MAX_FAILURES = 4
"""Number of first rounds of a batch size without a certified answer after which further rounds of that size are not tried."""
MAX_SAME_ERROR = 1e-4
"""Largest mean squared difference at which certified examples of different rounds count as the same example (40 dB)."""


@dataclass(frozen=True)
class CertifiedExamples:
    """The examples of a client that closed forms certify (see `ClosedForm.certify`), and the rounds that hold them.

    A round is certified if a closed form certifies all of its examples. An example that several certified rounds hold occurs
    once, with the values from the round with the highest confidence in it.
    x, y:        the examples (E, *shape) and their labels (E,).
    confidence:  (E,) in [0, 1], estimated probability that scoring counts the example as recovered; NaN if undecided.
    explained:   (E,) in [0, 1], share of the squared norm of the round's gradient that its closed-form answer explains; NaN if
                 unknown.
    evidence:    features from which confidence was estimated, by name, (E,) each; NaN for examples without the feature.
    slots:       one `Slot` for each position in the batches of the certified rounds, with the index in x of the example there.
    routes:      dict from the number of each certified round to the name of its closed form.
    missed:      largest loss of a closed form's answer to a certified round: the squared distance between the answer's gradient
                 and the observed one, relative to the squared norm of the observed one.
    evaluations, seconds: gradient evaluations and time, summed over all certified rounds.
    oracles:     names of the oracles (knowledge that no server has, such as true labels) that were used.
    """

    x: Tensor
    y: Tensor
    confidence: Tensor
    explained: Tensor
    evidence: dict[str, tuple[float, ...]]
    slots: tuple[Slot, ...]
    routes: dict[int, str]
    missed: float
    evaluations: int
    seconds: float
    oracles: tuple[str, ...]

    def describe(self) -> tuple[str, ...]:
        """Return a tuple of one note: the number of certified examples, and how many rounds each closed form certified."""
        names = ", ".join(f"{count} by {route}" for route, count in Counter(self.routes.values()).most_common())
        return (f"closed forms certify {len(self.x)} examples in {len(self.routes)} rounds without a search: {names}",)


def split_known_labels(case: Case) -> list[Tensor | None]:
    """Return the known labels (N,) of each observation of a case, or None for each if the case has none."""
    if case.known_labels is None:
        return [None] * len(case.observations)
    return list(torch.split(case.known_labels, [observation.num_examples or 0 for observation in case.observations]))


def certify_rounds(
    case: Case, rng: Generator, knows_defense: bool, device: str, progress: Progress | None = None
) -> CertifiedExamples | None:
    """Return the examples that the closed forms `DIRECT_ROUTES` certify in single observations of a case; None if there are none.

    If none of the first MAX_FAILURES observations with the same number of examples is certified, further ones with this number
    are not tried.
    With the same settings, answers depend only on the case and the seed of `rng`, so that a search that is resumed gets them
    again.
    Ctrl-C raises KeyboardInterrupt.
    """
    closed = ClosedForm(name="exact", routes=DIRECT_ROUTES, knows_defense=knows_defense, device=device)
    found: list[Reconstruction] = []
    failed, certified = Counter[int](), set[int]()
    for i, (observation, labels) in enumerate(zip(case.observations, split_known_labels(case), strict=True)):
        size = observation.num_examples or 0
        if size not in certified and failed[size] >= MAX_FAILURES:
            continue
        if progress is not None:
            progress(i, len(case.observations), f"closed forms: {len(found)} of {i} rounds certified")
        answer = closed.certify(Case((observation,), labels), rng=rng)
        if answer is None:
            failed[size] += 1
        else:
            certified.add(size)
            found.append(answer)
    return _unite_answers(found) if found else None


def _unite_answers(answers: Sequence[Reconstruction]) -> CertifiedExamples:
    """Return the examples of certified answers to single rounds; equal examples of different rounds are merged.

    A certified answer is one that passed the checks of `ClosedForm.certify`; it is not proven to be right.
    """
    groups = _group_equal(answers)
    number = {row: e for e, rows in enumerate(groups) for row in rows}
    best = [max(rows, key=lambda row: _get_certainty(answers, row)) for rows in groups]
    names = sorted(set().union(*(answer.evidence for answer in answers)))
    nan = float("nan")
    return CertifiedExamples(
        x=torch.stack([answers[a].x[i] for a, i in best]),
        y=torch.stack([answers[a].y[i] for a, i in best]),
        confidence=torch.stack([answers[a].confidence[i] for a, i in best]),
        explained=torch.stack([torch.tensor(nan) if (e := answers[a].explained) is None else e[i] for a, i in best]),
        evidence={
            name: tuple(answers[a].evidence[name][i] if name in answers[a].evidence else nan for a, i in best) for name in names
        },
        slots=tuple(replace(slot, example=number[a, slot.example]) for a, answer in enumerate(answers) for slot in answer.slots),
        routes={answer.slots[0].round: answer.route for answer in answers},
        missed=max(float(answer.loss[-1]) for answer in answers),
        evaluations=sum(answer.evaluations for answer in answers),
        seconds=sum(answer.seconds for answer in answers),
        oracles=tuple(dict.fromkeys(name for answer in answers for name in answer.oracles)),
    )


def _get_certainty(answers: Sequence[Reconstruction], row: tuple[int, int]) -> tuple[float, float]:
    """Return the key that ranks copies of an example: confidence (-1 if undecided), then minus the loss of its round.

    row: index of the answer, and of the example in it.
    """
    a, i = row
    confidence = float(answers[a].confidence[i])
    return (-1.0 if confidence != confidence else confidence), -float(answers[a].loss[-1])


def _group_equal(answers: Sequence[Reconstruction]) -> list[list[tuple[int, int]]]:
    """Return groups of pairs (index of an answer, index of an example in it) that are the same example in different rounds.

    Examples are the same if they have equal labels and a mean squared difference of at most MAX_SAME_ERROR. An example without
    equals is a group of its own.
    """
    groups: list[list[tuple[int, int]]] = []
    for a, answer in enumerate(answers):
        earlier = len(groups)
        first = torch.stack([answers[b].x[j] for b, j in (rows[0] for rows in groups)]) if groups else answer.x[:0]
        labels = torch.tensor([int(answers[b].y[j]) for b, j in (rows[0] for rows in groups)])
        free = torch.ones(earlier, dtype=torch.bool)
        for i in range(len(answer.x)):
            off = (first - answer.x[i]).flatten(1).square().mean(dim=1)
            off = off.masked_fill(~free | (labels != answer.y[i]), torch.inf)
            nearest = int(off.argmin()) if earlier else -1
            if nearest >= 0 and float(off[nearest]) <= MAX_SAME_ERROR:
                groups[nearest].append((a, i))
                free[nearest] = False
            else:
                groups.append([(a, i)])
    return groups
