"""The data of problems (one search of one case each), and functions that map over problems."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

ProblemRow = dict[str, Any]
"""The data of one problem as nested dictionaries of tensors; the data of several problems are stacked along the first axis."""
Decode = Callable[[Tensor, ProblemRow], tuple[Tensor, Tensor]]
"""Maps latents and the data of their problems to all examples of each problem and their labels."""


def map_problems(function: Callable[..., Any], *rows: Any) -> Any:
    """Return the results of `function` for all problems, stacked; the first axis of tensors in `rows` has one entry per problem.

    rows: tensors or nested mappings of tensors, each an argument of `function`. A single problem is computed without `vmap`.
    """
    first = next(iter(tree_leaves(rows)))
    if len(first) > 1:
        return vmap(function, randomness="different")(*rows)
    result = function(*tree_map(lambda t: t[0], rows))
    return tree_map(lambda t: t[None], result)


def get_row(nested: ProblemRow, i: int) -> ProblemRow:
    """Return the data of the problem with index i, given the stacked data of several problems."""
    return tree_map(lambda t: t[i], nested)  # type: ignore[no-any-return]


def select_rows(nested: ProblemRow, rows: Tensor) -> ProblemRow:
    """Return the stacked data of the problems with the indices `rows`."""
    return tree_map(lambda t: t[rows], nested)  # type: ignore[no-any-return]
