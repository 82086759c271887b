"""Example of an update from the gradients of a patch embedding and of the trained positions that are added to its outputs.

A vision transformer maps each patch x_p of an image linearly to W x_p + b, and adds a trained vector to it for the position p.
For one example, the gradient d_p of this vector is that of the embedding's output, and the gradient of W is the sum of d_p x_p^T.
If the vectors d_p of all positions are linearly independent, all patches follow (Lu et al. 2022, "APRIL: Finding the Achilles'
Heel on Privacy for Vision Transformers"). If a few combinations of them vanish, as with slightly more patches than outputs of the
embedding, the same combinations of patches are free, and are searched for in the gradient of the other layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacker.attacks.closed_form.observations import StackedObservations
from attacker.attacks.networks.forward import record_calls, run_forward_pass
from attacker.attacks.simulation.gradients import squared_norm

MAX_ERROR = 1e-4
"""Largest relative error at which an input counts as a scaled and shifted pixel, and two gradients as equal."""
MIN_SINGULAR_VALUE = 1e-5
"""Smallest singular value of the gradients of the positions, relative to the largest, that does not count as zero."""
MAX_FREE = 0.1
"""Largest share of combinations of patches that may be left open by the gradient of the embedding."""
MAX_FITS = 50
"""Largest number of iterations of the search for these combinations."""
MIN_POWER = 1e-300
"""Smallest squared distance of gradients by which the loss of this search is divided, so that it is not divided by zero."""
UNEXPLAINED = (
    "with the stated loss and learning rate, the example does not explain the gradient of all layers: it is a mixture of several "
    "examples, or clients train otherwise than stated"
)
DEPENDENT = (
    "the gradients of the positions are linearly dependent, as with more patches than outputs of their embedding, so that the "
    "patches do not follow from them"
)


@dataclass(frozen=True, kw_only=True)
class PatchLayer:
    """A layer that embeds each of P patches of an example by the same weight (D, F).

    name: of the layer. positions: name of the trained positions, whose rows `rows` belong to the patches. pixels: (P, F) index of
    the value of the flattened example that each input is. scale, shift: (P, F); the input is scale * value + shift.
    """

    name: str
    positions: str
    rows: slice
    pixels: Tensor
    scale: Tensor
    shift: Tensor


def find_patch_layer(observed: StackedObservations, i: int) -> PatchLayer | None:
    """Return the layer that embeds the patches of the example of case i, see `PatchLayer`; None if there is none.

    It is a linear layer, or a convolution whose stride is its kernel's size. It is found by forward passes of three examples at
    the weights that the server sent. Positions are recognised by their gradient in the last pass. None also if the network fails.
    """
    data, state = observed.data, {name: w.detach().requires_grad_() for name, w in observed.get_weights(i).items()}
    drawn = torch.rand(data.shape, generator=torch.Generator().manual_seed(0)).to(observed.device, observed.dtype)
    layers = {n: m for n, m in observed.model.named_modules() if isinstance(m, nn.Linear) or _reads_patches(m)}
    try:
        with record_calls(layers) as seen:
            for x in (torch.zeros_like(drawn), torch.ones_like(drawn), drawn):
                with torch.set_grad_enabled(x is drawn):
                    logits = run_forward_pass(observed.model, {**observed.get_buffers(i), **state}, data.normalise(x[None]))
    except Exception:  # a user's network may fail in any way, which the search reports
        return None
    for name, passes in seen.items():
        weight = f"{name}.weight"
        if len(passes) != 3 or weight not in observed.gradient or weight in observed.omitted:
            continue
        low, high, middle = (_cut(observed.model.get_submodule(name), given) for given, _ in passes)
        if low.numel() != data.size or len(low) == 1:
            continue
        scale = high - low
        if not float(scale.abs().min()) > MAX_ERROR * float(scale.abs().max()):
            continue
        pixels = _find_pixels((middle - low) / scale, drawn)
        positions = None if pixels is None else _find_positions(logits, passes[2][1], state, len(low))
        if pixels is not None and positions is not None and positions[0] not in observed.omitted:
            return PatchLayer(
                name=name, positions=positions[0], rows=positions[1], pixels=pixels, scale=scale.detach(), shift=low.detach()
            )
    return None


@dataclass(frozen=True, kw_only=True)
class SolvedPatches:
    """The patches of an example as its embedding's gradient determines them.

    inputs: (P, F) of the embedding. certainty: explained share of the gradient of the embedding's weight. free: (P, K)
    orthonormal combinations of patches that do not change this gradient; in `inputs` they are those of a grey example (0.5).
    """

    layer: PatchLayer
    inputs: Tensor
    certainty: float
    free: Tensor

    def place(self, inputs: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the example (1, *shape) whose patches have these inputs (P, F)."""
        values = ((inputs - self.layer.shift) / self.layer.scale).flatten()
        places = self.layer.pixels.flatten().argsort()
        return values[places].reshape(1, *shape)


def solve_patches(observed: StackedObservations, layer: PatchLayer, i: int) -> SolvedPatches | None:
    """Return the patches of the only example of case i; None if more than `MAX_FREE` of their combinations are not determined."""
    weight = observed.gradient[f"{layer.name}.weight"][i].flatten(1)
    slopes = observed.gradient[layer.positions][i].reshape(-1, len(weight))[layer.rows]
    combinations, values, _ = torch.linalg.svd(slopes)
    rank = int((values > MIN_SINGULAR_VALUE * values[0]).sum())
    if rank < (1 - MAX_FREE) * len(slopes):
        return None
    grey = layer.shift + 0.5 * layer.scale
    inputs = grey + torch.linalg.pinv(slopes.T, rtol=MIN_SINGULAR_VALUE) @ (weight - slopes.T @ grey)
    missed = float((slopes.T @ inputs - weight).square().sum() / weight.square().sum())
    return SolvedPatches(layer=layer, inputs=inputs, certainty=max(0.0, 1 - missed), free=combinations[:, rank:])


def fit_free_patches(observed: StackedObservations, solved: SolvedPatches, i: int, y: Tensor) -> Tensor:
    """Return the example of case i, (1, *shape), whose free combinations of patches are fitted to the gradient of all layers.

    They are found by L-BFGS, from those of a grey example. Clients take one step of SGD, without a defense. y: label (1,).
    """
    shape, weights, buffers = observed.data.shape, observed.get_weights(i), observed.get_buffers(i)
    target = {name: g[i] for name, g in observed.gradient.items() if name not in observed.omitted}
    start = (squared_norm(target) * observed.measure_misfit(i, solved.place(solved.inputs, shape), y) ** 2).clamp(min=MIN_POWER)
    chosen = torch.zeros_like(solved.free.T @ solved.inputs).requires_grad_()
    search = torch.optim.LBFGS([chosen], max_iter=MAX_FITS, tolerance_grad=0, line_search_fn="strong_wolfe")

    def measure() -> Tensor:
        search.zero_grad()
        x = solved.place(solved.inputs + solved.free @ chosen, shape)
        simulated = observed.simulated(weights, x, y, buffers)
        loss = torch.stack([(simulated[name] - g).square().sum() for name, g in target.items()]).sum() / start
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    search.step(measure)  # type: ignore[no-untyped-call]
    return solved.place(solved.inputs + solved.free @ chosen.detach(), shape)


def _reads_patches(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Conv2d) and module.groups == 1 and module.stride == module.kernel_size and not any(module.padding)
    )


def _cut(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the inputs of a layer for one example as rows (P, F), in the order in which its weight multiplies them."""
    if isinstance(module, nn.Conv2d):
        return functional.unfold(inputs, module.kernel_size, stride=module.stride)[0].T
    return inputs.reshape(-1, inputs.shape[-1])


def _find_pixels(values: Tensor, x: Tensor) -> Tensor | None:
    """Return the index of each of `values` among those of the example x, all different; None if the values differ."""
    sorted_x, order = x.flatten().sort()
    sorted_values, places = values.detach().flatten().sort()
    if not bool(((sorted_values - sorted_x).abs() <= MAX_ERROR * sorted_x.diff().clamp(min=1e-12).mean()).all()):
        return None
    pixels = torch.empty_like(order)
    pixels[places] = order
    return pixels.reshape(values.shape)


def _find_positions(logits: Tensor, outputs: Tensor, state: dict[str, Tensor], patches: int) -> tuple[str, slice] | None:
    """Return the parameter whose gradient has that of a layer's outputs as its first or last rows, and these rows; or None."""
    width = outputs.shape[1] if outputs.ndim == 4 else outputs.shape[-1]
    candidates = {name: w for name, w in state.items() if w.ndim > 1 and w.shape[-1] == width and w.numel() >= patches * width}
    loss = logits.log_softmax(dim=1)[0, 0] if logits.shape[1] > 1 else logits.sum()
    slope, *others = torch.autograd.grad(loss, [outputs, *candidates.values()], materialize_grads=True, retain_graph=True)
    if not bool(slope.any()):
        return None
    expected = slope.flatten(2)[0].T if slope.ndim == 4 else slope.reshape(-1, width)
    if len(expected) != patches:
        return None
    for name, gradient in zip(candidates, others, strict=True):
        for rows in (slice(-patches, None), slice(patches)):
            part = gradient.reshape(-1, width)[rows]
            if bool(((part - expected).abs() <= MAX_ERROR * expected.abs().max()).all()):
                return name, rows
    return None
