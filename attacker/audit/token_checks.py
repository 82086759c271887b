"""Check whether the update of an embedding shows which tokens a client's examples contain."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from attacker.attacks.networks.discrete_inputs import EMBEDDINGS, find_token_embeddings, has_real_inputs
from attacker.audit.defense_outputs import apply, draw_like
from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from fedsim import models
from fedsim.recording import DataSpec, Observation
from fedsim.recording.masked_vectors import SUM_CLIENT

TOKENS_RULE = "tokens-readable"
OUTLIER_FACTOR = 10.0
"""A row counts as changed by tokens if its norm is larger than this times the median norm of all rows. Most tokens occur in
no example, so that the median is the norm of an unchanged row. Gaussian noise alone practically never makes the norm of a row of
`MIN_DIMENSIONS` or more values larger than this."""
MIN_DIMENSIONS = 4
"""Smallest number of columns of an embedding that is tested."""
MAX_LISTED = 12
"""Largest number of tokens that are listed."""


def check_tokens(observations: Sequence[Observation]) -> Iterator[CheckResult]:
    """Yield one result: a `Finding` if some rows of an embedding stand out in an update; they name the tokens of the examples.

    The gradient of an embedding is zero in all rows whose token occurs in no example, so that the other rows show which tokens
    occur (Melis et al. 2019, section 4.1). They do not show the order of the tokens, nor which example holds which token.
    """
    first = observations[0]
    layout = models.build_layout(first.model, first.data)
    if not any(isinstance(module, EMBEDDINGS) for module in layout.modules()):
        yield NotChecked(rule=TOKENS_RULE, reason="the network has no embedding of tokens")
        return
    try:
        model = models.build(first.model, first.data)
        embeddings, has_numbers = _list_embeddings(model, first.data), has_real_inputs(model, first.data)
    except Exception as error:  # a network that is not built in may raise anything
        reason = f"the network raised {type(error).__name__} when it was run to find its embeddings of tokens: {error}"
        yield NotChecked(rule=TOKENS_RULE, reason=reason, kind="left out")
        return
    wide = {name for name in embeddings if name in first.update and first.update[name].shape[-1] >= MIN_DIMENSIONS}
    if not wide:
        reason = f"no recorded embedding of at least {MIN_DIMENSIONS} dimensions is indexed by the inputs"
        yield NotChecked(rule=TOKENS_RULE, reason=reason)
        return
    tied = sorted(name for name in wide if embeddings[name])
    if wide == set(tied):
        reason = (
            f"{', '.join(tied)} weights the outputs as well, which changes the rows of all tokens: this check does not tell "
            "those that occur from the others, and an attacker may"
        )
        yield NotChecked(rule=TOKENS_RULE, reason=reason, kind="inconclusive")
        return
    yield _judge(observations, wide - set(tied), has_numbers=has_numbers)


def _list_embeddings(model: nn.Module, data: DataSpec) -> dict[str, bool]:
    """Return a dict from the parameters that embed tokens to whether they are outputs' weights as well, as in tied networks.

    A parameter of several layers has the name under which it is recorded. It is an output's weight if, for examples of a single
    token, the gradient of most of its rows is not zero. Raises what `model` raises for inputs of zeros or ones.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    token_weights = {id(model.get_parameter(name)) for name in find_token_embeddings(model, data)}
    weights = {names[key]: model.get_parameter(names[key]) for key in token_weights}
    if not weights:
        return {}
    with torch.enable_grad():
        model.requires_grad_(True)
        outputs = model(torch.zeros(2, *data.shape)).square().sum()
        gradients = torch.autograd.grad(outputs, list(weights.values()), allow_unused=True)
    shares = [0.0 if g is None else float((g != 0).any(dim=1).double().mean()) for g in gradients]
    return {name: share > 0.5 for name, share in zip(weights, shares, strict=True)}


def _judge(observations: Sequence[Observation], embeddings: set[str], *, has_numbers: bool) -> CheckResult:
    """Return the result for these embeddings. has_numbers: whether examples hold real numbers beside the codes of categories."""
    readable: list[tuple[Observation, str, list[int]]] = []
    for observation in observations:
        keeps_zeros = _keeps_zero_rows(observation, embeddings)
        for name in sorted(embeddings):
            rows = find_outlying_rows(observation.update[name], observation.weights[name], zeros_count=keeps_zeros)
            if rows:
                readable.append((observation, name, rows))
    if not readable and any(
        _keeps_zero_rows(observation, embeddings)
        and any(float(observation.update[name].abs().amax(dim=1).median()) > 0 for name in embeddings)
        for observation in observations
    ):
        reason = "most rows of the embedding changed, by tokens or by weight decay, which cannot be told apart"
        return NotChecked(rule=TOKENS_RULE, reason=reason, kind="inconclusive")
    if not readable:
        return PassedCheck(rule=TOKENS_RULE, evidence=f"no rows of an embedding stand out in {len(observations)} updates")
    first = readable[0][0]
    of_sums = all(seen.client == SUM_CLIENT for seen, _, _ in readable)
    whose = "the clients of a secure sum" if of_sums else "a client"
    what, of_all = ("categories", "codes") if has_numbers else ("tokens", "tokens of the vocabulary")
    limitation = " The check reads nothing of the real numbers that the examples hold as well." if has_numbers else ""
    named = ", ".join(sorted({name for _, name, _ in readable}))
    occurring = "; ".join(
        f"{len(rows)} of the {len(first.update[name]):,} {of_all}{f' of {name}' * has_numbers} occur, those with the numbers "
        f"{', '.join(map(str, rows[:MAX_LISTED]))}{', ...' * (len(rows) > MAX_LISTED)}"
        for seen, name, rows in readable
        if seen is first
    )
    return Finding(
        rule=TOKENS_RULE,
        grade="moderate" if of_sums or has_numbers else "serious",
        title=f"The server can read from the update of {named} which {what} the examples of {whose} contain.",
        evidence=f"In {len({seen.key for seen, _, _ in readable})} of {len(observations)} updates only the rows of {what} that "
        f"occur change. Round {first.round}, client {first.client}: {occurring}.{limitation}",
        advice="Freeze the embedding, or clip the update and add noise to all of its rows, or sum the updates of many clients by "
        "secure aggregation.",
    )


def find_outlying_rows(update: Tensor, weights: Tensor, *, zeros_count: bool) -> list[int]:
    """Return the indices of the rows of `update` (V, D) that changed more than weight decay and noise explain, ascending.

    Weight decay adds the same multiple of `weights`, (V, D) before training, to all rows. This multiple is estimated by a median
    and subtracted. A row is then returned if its norm is more than `OUTLIER_FACTOR` times the median norm of all rows. If tokens
    changed most rows, few or none are returned.
    zeros_count: whether the defense leaves rows of zeros zero. If true, and some row is zero in `update` but not in `weights`,
    there was no weight decay, and all nonzero rows are returned. If false, and the median norm is zero, no row is returned.
    """
    update, weights = update.double(), weights.double()
    powers, unchanged = weights.square().sum(dim=1), (update == 0).all(dim=1)
    if zeros_count and bool((unchanged & (powers > 0)).any()):  # so there is no weight decay
        return torch.nonzero(~unchanged).flatten().tolist()
    decay = ((update * weights).sum(dim=1) / powers.clamp(min=1e-30))[powers > 0]
    rest = update - (decay.median() if len(decay) else 0.0) * weights
    norms = rest.norm(dim=1)
    typical = float(norms.median())
    if typical == 0 and not zeros_count:
        return []
    return torch.nonzero(norms > OUTLIER_FACTOR * typical).flatten().tolist()


def _keeps_zero_rows(observation: Observation, embeddings: set[str]) -> bool:
    """Return whether the declared defense leaves rows of zeros zero, as tested on one random update; true without a defense.

    If so, nonzero rows hold data, and not only noise.
    """
    if not observation.defenses.steps:
        return True
    update = {name: t.clone() for name, t in draw_like(observation.update, 0).items()}
    for name in embeddings:
        update[name][1:] = 0
    sent = apply(observation.defenses, update, 0)
    return all(bool((sent[name][1:] == 0).all()) for name in embeddings)
