"""Warnings for users of attacks on a network: what batch norm, random numbers and imprint layers mean for the results.

Also checks that the training mode is stated where it matters and that the loss suits the logits.
"""

from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from fedsim.models.foreign import copy_module, find_client_types
from fedsim.models.imprint import Imprint
from fedsim.models.losses import find_loss
from fedsim.models.wide_head import WideHead
from fedsim.recording.observation import DataSpec
from fedsim.recording.safe_files import shorten
from fedsim.recording.training import Training

RANDOM_CLIENTS_WARNING = (
    "clients draw random numbers while they train (dropout or the like), which attacks do not know, so that no simulated "
    "gradient fits exactly"
)

MALICIOUS_SERVER_WARNING = (
    "the server is malicious: it has inserted an imprint layer, which sorts the examples of a batch into single neurons, so that "
    "no result on this model holds for an honest-but-curious server"
)


WIDE_HEAD_WARNING = (
    "the server has added a wide layer with random Gaussian weights, whose inputs the gradient of the last layer reveals, so "
    "that no result on this model holds for the network without it"
)


SHAPING_NODES = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Alias", "Slice", "Select")
"""Beginnings of the names of autograd nodes that change only the shape of a tensor."""
PROBABILITIES_WARNING = (
    "the network ends in a sigmoid or softmax, and attacks compute the loss of its outputs as of logits: unless clients do so as "
    "well, name a function whose network has the same weights and returns the values before it"
)


def list_warnings(network: nn.Module, training: Training, data: DataSpec) -> list[str]:
    """Return warnings for users of attacks on this network, a list of one text each; empty if there is nothing to say.

    The warnings state that the network has an imprint layer or a wide layer that a server has added; how attacks treat batch
    norm, if there is any, in the mode of `training`, "train" or "eval"; that the network returns probabilities; which names in
    `training.frozen` are those of no parameter; and that clients draw random numbers (`list_unsimulated`).
    """
    normed = _has_batch_norm(network)
    found = [MALICIOUS_SERVER_WARNING] if any(isinstance(module, Imprint) for module in network.modules()) else []
    found += [WIDE_HEAD_WARNING] if any(isinstance(module, WideHead) for module in network.modules()) else []
    if normed and training.mode != "train":
        found.append(
            "attacks assume that clients use the batch-norm statistics that the server sends (mode 'eval'); if clients call "
            "net.train(), set mode='train' and buffers='shared', or no simulated gradient fits"
        )
    if normed and training.mode == "train":
        found.append(
            "batch norm uses the statistics of each batch (mode 'train'): attacks simulate all examples of a batch together"
        )
    if _returns_probabilities(network, data):
        found.append(PROBABILITIES_WARNING)
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    if unknown := [pattern for pattern in training.frozen if not any(fnmatchcase(name, pattern) for name in names)]:
        found.append(
            f"training.frozen: no parameter of the network is named {', '.join(unknown)}; its names are {shorten(names)}"
        )
    return found + list_unsimulated(network, training, data)


def list_unsimulated(network: nn.Module, training: Training, data: DataSpec) -> list[str]:
    """Return a list with a warning if clients draw random numbers, such as dropout, while they train; otherwise empty.

    Attacks do not know these numbers. Modules of dropout draw none if `training.mode` is not "train", but a function may draw
    some in both modes, such as `functional.dropout(x)` without `training=self.training`.
    """
    return [RANDOM_CLIENTS_WARNING] if _is_random(network, data, mode=training.mode) else []


def require_mode(network: nn.Module, training: Training, data: DataSpec) -> Training:
    """Return the training settings with a mode, "train" or "eval": the mode that they state, else "eval".

    Raises ValueError if none is stated and the network computes differently in the two modes: it has batch norm or draws random
    numbers in training mode.
    """
    if training.mode != "unstated":
        return training
    if _has_batch_norm(network) or _is_random(network, data, mode="train"):
        raise ValueError(
            "the network computes differently while it trains (batch norm, dropout or other random numbers), so attacks must "
            "know how clients train: set training.mode to 'train' if they call net.train(), as most apps do, or to 'eval' if "
            "they call net.eval(); if they send the statistics of batch norm back, set training.buffers to 'shared' as well"
        )
    return replace(training, mode="eval")


def adopt_precision(network: nn.Module, training: Training) -> Training:
    """Return the training settings with the `precision` of a network that the user's function makes in half precision.

    If they state another precision than float32 already, or the network has no such parameters, they are returned as they are.
    """
    kinds = set(find_client_types(network).values())
    if training.precision != "float32" or not kinds & {torch.bfloat16, torch.float16}:
        return training
    return replace(training, precision="bfloat16" if torch.bfloat16 in kinds else "float16")


def check_loss(network: nn.Module, training: Training, data: DataSpec) -> None:
    """Raise ValueError if the network's logits do not suit the loss of `training`, such as a single logit and cross-entropy."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        logits = copy_module(network).eval()(data.normalise(torch.zeros(1, *data.shape)))
        find_loss(training.loss)(logits, torch.zeros(1, dtype=torch.long))


def _returns_probabilities(network: nn.Module, data: DataSpec) -> bool:
    """Return whether the last operation of a network, apart from changes of shape, is a sigmoid or a softmax.

    False for a network on the meta device, and for one that fails on a random input.
    """
    if any(tensor.is_meta for tensor in network.state_dict().values()):
        return False
    copied = copy_module(network).eval()
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            node = copied(data.normalise(torch.rand(2, *data.shape)).requires_grad_()).grad_fn
    except (RuntimeError, ValueError, TypeError, IndexError):  # a network that fails on these inputs shows nothing
        return False
    while node is not None and node.name().startswith(SHAPING_NODES):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(("SigmoidBackward", "SoftmaxBackward"))


def _has_batch_norm(network: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())


def _is_random(network: nn.Module, data: DataSpec, *, mode: str) -> bool:
    """Return whether a network draws random numbers in a mode, "train" or another, which stands for eval.

    It does if it has modules of dropout, which act in mode "train" only, or if it computes two different outputs for the same
    random input. The comparison of outputs also detects random functions that are not modules. A network on the meta device is
    searched for dropout only. Without dropout, a network that fails on this input is taken as not random.
    """
    dropouts = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in network.modules())
    if dropouts and mode == "train":
        return True
    if any(tensor.is_meta for tensor in network.state_dict().values()):
        return False
    copied = copy_module(network).train(mode == "train")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        x = data.normalise(torch.rand(2, *data.shape))
        try:
            one, other = (copied(x) for _ in range(2))
        except (RuntimeError, ValueError, TypeError):  # nothing can be concluded from a network that fails on these inputs
            return False
    return not torch.equal(one, other)
