"""Checks of settings that make attacks easy, whatever the data are."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from attacker.audit.label_checks import format_counts
from fedsim import models
from fedsim.recording import Observation, Recording

SINGLE_RULE, METRICS_RULE, SECURE_RULE, STATISTICS_RULE, BUFFERS_RULE = (
    "single-examples",
    "metrics-in-clear",
    "secure-aggregation",
    "batch-statistics",
    "changing-buffers",
)
BATCH_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names of batch norm's buffers."""
MAX_NAMED = 6
"""Largest number of buffers that a finding names."""
COUNT_TOLERANCE = 1e-3
"""Largest distance of a buffer's change from a whole number at which it counts as one; averaged buffers are rounded."""
EQUATION_METRICS = ("loss", "accuracy")
"""Words in the names of metrics that are functions of a client's examples."""
MIN_COHORT = 3
"""Smallest number of clients in a secure sum that is not reported as very few."""
COHORTS_RULE = "cohorts-isolate-clients"
ISOLATED_TOLERANCE = 1e-6
"""Squared distance of a client's unit vector from the span of the cohorts below which the client counts as isolated. Singular
values smaller than this share of the largest one count as zero."""


def check_settings(recording: Recording, observations: Sequence[Observation]) -> Iterator[CheckResult]:
    """Yield the results of the checks of settings, each a finding if the setting is weak.

    The checks test whether there are updates of a single example, whether metrics of a single example, batch-norm statistics or
    other buffers that change are sent, and, for secure aggregation, its threshold and number of clients, and whether sums of
    several rounds isolate a client.
    """
    yield _check_examples(observations)
    yield _check_metrics(observations)
    yield from _check_buffers(observations, of_experiment=(recording.folder.parent / "experiment.toml").exists())
    yield from _check_secure(recording)
    yield from _check_cohorts(recording)


def _check_examples(observations: Sequence[Observation]) -> CheckResult:
    single = [observation for observation in observations if observation.num_examples == 1]
    known = [observation.num_examples for observation in observations if observation.num_examples]
    if not single and len(known) < len(observations):
        reason = f"{len(observations) - len(known)} of {len(observations)} updates come without a number of examples"
        return NotChecked(rule=SINGLE_RULE, reason=reason, kind="needs information")
    if not single:
        return PassedCheck(rule=SINGLE_RULE, evidence=f"every update is of at least {min(known)} examples")
    return Finding(
        rule=SINGLE_RULE,
        grade="low",
        title=f"{'Every update is' if len(single) == len(observations) else 'Some updates are'} of a single example, which "
        "attacks reconstruct most easily.",
        evidence=f"{len(single)} of {len(observations)} updates are of one example.",
        advice="Compute each update from several steps on larger batches; this alone is no protection.",
    )


def _check_metrics(observations: Sequence[Observation]) -> CheckResult:
    """Return the result: whether clients report a metric of a single example with "loss" or "accuracy" in its name, in clear."""
    few = [observation for observation in observations if observation.num_examples == 1 and _list_equations(observation)]
    if not few:
        return PassedCheck(rule=METRICS_RULE, evidence="no client reports the loss or the accuracy of a single example")
    names = ", ".join(sorted({name for observation in few for name in _list_equations(observation)}))
    return Finding(
        rule=METRICS_RULE,
        grade="low",
        title="Clients send metrics of single examples in clear.",
        evidence=f"{len(few)} of {len(observations)} updates come with {names}. Each value is one more equation that the "
        "example satisfies, and no defense changes it.",
        advice="Report metrics of many examples, or with noise, or not at all.",
    )


def _list_equations(observation: Observation) -> list[str]:
    return [name for name in observation.metrics if any(word in name for word in EQUATION_METRICS)]


def _check_buffers(observations: Sequence[Observation], *, of_experiment: bool) -> Iterator[CheckResult]:
    """Yield two results: whether batch-norm statistics are sent, and whether other buffers are.

    Buffers that no client changes are ignored. of_experiment: whether an experiment of this project made the recording, and
    not an app that records itself.
    """
    changed = {
        name: None for observation in observations for name in observation.buffers_after if _has_changed(observation, name)
    }
    norms = _list_batch_norm_buffers(observations[0], changed)
    defended = any(observation.defenses.steps or observation.gradient.step for observation in observations)
    advice = _advise_on_buffers(of_experiment=of_experiment)
    statistics, others = ([name for name in changed if (name in norms) is wanted] for wanted in (True, False))
    if statistics:
        yield Finding(
            rule=STATISTICS_RULE,
            grade="moderate" if defended else "low",
            title="Clients send batch-norm statistics, which no defense covers.",
            evidence=f"{_count_senders(observations, statistics)} come with {_name_buffers(statistics)}: means and variances of "
            "a client's batches, and their number. Searches compare them with those of candidate images, "
            "which makes small batches much easier to reconstruct.",
            advice=f"{advice} Or use another normalisation.",
        )
    else:
        yield PassedCheck(rule=STATISTICS_RULE, evidence="clients send no batch-norm statistics that change")
    if not others:
        yield PassedCheck(rule=BUFFERS_RULE, evidence="clients send no buffers that change, apart from batch-norm statistics")
        return
    histograms = [histogram for name in others if (histogram := _describe_histogram(observations, name))]
    evidence = f"{_count_senders(observations, others)} come with {_name_buffers(others)}, which may be computed from the data."
    yield Finding(
        rule=BUFFERS_RULE,
        grade="moderate" if defended or histograms else "low",
        title="Clients send the numbers of their examples of each label in a buffer, which no defense covers."
        if histograms
        else "Clients send buffers that change while they train, which no defense covers.",
        evidence=" ".join([evidence, *histograms]),
        advice=advice,
    )


def _has_changed(observation: Observation, name: str) -> bool:
    """Return whether the observed client sent the buffer `name` with changed values; true if it had not received this buffer."""
    before = observation.buffers.get(name)
    return before is None or not torch.equal(before.double(), observation.buffers_after[name].double())


def _list_batch_norm_buffers(observation: Observation, names: Iterable[str]) -> set[str]:
    """Return the buffers among `names` that belong to batch-norm layers.

    If the network cannot be built, these are the buffers whose names end with one of `BATCH_NORM_BUFFERS`.
    """
    buffers = {name for name in names if name.rpartition(".")[2] in BATCH_NORM_BUFFERS}
    try:
        network = models.build_layout(observation.model, observation.data)
    except ValueError:
        return buffers
    layers = {name for name, layer in network.named_modules() if isinstance(layer, _BatchNorm)}
    return {name for name in buffers if name.rpartition(".")[0] in layers}


def _describe_histogram(observations: Sequence[Observation], name: str) -> str:
    """Return a sentence on a buffer whose change is the label histogram in some update; "" if there is no such update."""
    counts = [found for observation in observations if (found := _read_histogram(observation, name))]
    if not counts:
        return ""
    return (
        f"The change of {name} is the label histogram in {len(counts)} of {len(observations)} updates: its values are whole "
        f"numbers that sum to the number of examples. In the first, {format_counts(counts[0])}."
    )


def _read_histogram(observation: Observation, name: str) -> list[int]:
    """Return the change of a buffer if it can be the number of examples of each label; else an empty list.

    Each example may be counted once, or once in every epoch.
    """
    before, after = observation.buffers.get(name), observation.buffers_after.get(name)
    if before is None or after is None or after.shape != (observation.data.num_classes,) or not observation.num_examples:
        return []
    change = after.double() - before.double()
    whole = change.round()
    sums = (observation.num_examples, observation.num_examples * (observation.training.epochs or 1))
    near = bool(((change - whole).abs() <= COUNT_TOLERANCE).all() and (whole >= 0).all())
    return [int(count) for count in whole] if near and int(whole.sum()) in sums else []


def _count_senders(observations: Sequence[Observation], names: Sequence[str]) -> str:
    count = sum(
        any(name in observation.buffers_after and _has_changed(observation, name) for name in names)
        for observation in observations
    )
    return f"{count} of {len(observations)} updates"


def _name_buffers(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"changed values of {len(names)} buffer{'s' * (len(names) != 1)} ({', '.join(names[:MAX_NAMED])}{more})"


def _advise_on_buffers(*, of_experiment: bool) -> str:
    if of_experiment:
        return 'Keep buffers on the clients: set training.buffers to "local" in the experiment.'
    return (
        "Change the app, so that clients send and load parameters only (net.named_parameters()) and not the whole state_dict; "
        "each client then keeps its own buffers."
    )


def _check_secure(recording: Recording) -> Iterator[CheckResult]:
    """Yield results on secure aggregation: a finding for a low threshold, one for sums of very few clients, or one result passed.

    The threshold is the number of clients whose shares suffice to unmask another client; it is low if it is at most half of the
    clients. A `NotChecked` is yielded if the run uses no secure aggregation.
    """
    agreed = recording.manifest.secure_aggregation
    if not agreed:
        reason = "no secure aggregation is used: the server sees each client's update"
        yield NotChecked(rule=SECURE_RULE, reason=reason, kind="no guarantee")
        return
    sizes = {number: len(recording.list_summed(number)) for number in recording.list_rounds()}
    small = {number: size for number, size in sizes.items() if 0 < size < MIN_COHORT}
    threshold = agreed.get("threshold") if isinstance(agreed, dict) else None
    clients = max(sizes.values(), default=0)
    if isinstance(threshold, int) and 2 * threshold <= clients:
        yield Finding(
            rule=SECURE_RULE,
            grade="moderate",
            title="The threshold of secure aggregation is at most half of the clients.",
            evidence=f"threshold {threshold} of {clients} clients: a lying server could unmask one of them by requesting "
            "different shares from each half.",
            advice="Set the threshold above half of the clients.",
        )
    if small:
        number, size = next(iter(small.items()))
        yield Finding(
            rule=SECURE_RULE,
            grade="moderate",
            title="Some secure sums are of very few clients.",
            evidence=f"{len(small)} of {len(sizes)} rounds, the first: round {number} with {size} client{'s' * (size != 1)}.",
            advice=f"Abort rounds with fewer than {MIN_COHORT} clients; more clients in a sum hide each of them better.",
        )
    if not small and not (isinstance(threshold, int) and 2 * threshold <= clients):
        minimum = min((size for size in sizes.values() if size), default=0)
        yield PassedCheck(rule=SECURE_RULE, evidence=f"each secure sum is of at least {minimum} clients")


def _check_cohorts(recording: Recording) -> Iterator[CheckResult]:
    """Yield at most one result: a `Finding` if linear combinations of the secure sums of all rounds isolate some client's update.

    The result is `PassedCheck` if no client is isolated, see `find_isolated_clients`. Without secure aggregation, there is none.
    """
    if not recording.manifest.secure_aggregation:
        return
    cohorts = [cohort for number in recording.list_rounds() if (cohort := recording.list_summed(number))]
    isolated = find_isolated_clients(cohorts)
    if not isolated:
        yield PassedCheck(
            rule=COHORTS_RULE, evidence=f"no linear combination of the {len(cohorts)} sums isolates a single client"
        )
        return
    clients = len({client for cohort in cohorts for client in cohort})
    yield Finding(
        rule=COHORTS_RULE,
        grade="moderate",
        title="The sums of several rounds together single out clients.",
        evidence=f"Linear combinations of the sums of {len(cohorts)} rounds single out {len(isolated)} of {clients} clients, "
        f"first {isolated[0]}. The combination is near this client's update if all updates change little from round to round.",
        advice="Sum the same groups of clients in every round; if a client is missing, leave out its whole group.",
    )


def find_isolated_clients(cohorts: Sequence[Sequence[str]]) -> list[str]:
    """Return, sorted, each client whose update is a linear combination of the sums.

    It is assumed that each client's update is the same in all rounds.
    cohorts: for each round, the clients whose updates are summed.
    """
    clients = sorted({client for cohort in cohorts for client in cohort})
    if not clients:
        return []
    took_part = torch.tensor([[float(client in cohort) for client in clients] for cohort in cohorts], dtype=torch.float64)
    _, singular, rows = torch.linalg.svd(took_part, full_matrices=False)
    basis = rows[singular > ISOLATED_TOLERANCE * singular[0]]
    squared_distances = (1 - basis.square().sum(0)).tolist()  # of each client's unit vector from the span of the cohorts
    return [client for client, distance in zip(clients, squared_distances, strict=True) if distance < ISOLATED_TOLERANCE]
