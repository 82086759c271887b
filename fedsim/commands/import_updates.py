"""Import of one update, given as two state dicts of any framework: the weights that a client was sent and those it returned."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError
from time import gmtime, strftime
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from safetensors.torch import load_file
from torch import Tensor

from defenses.registry import suggest_name
from defenses.spec import DefenseSpec
from fedsim import models
from fedsim.config.experiment import ExperimentError, NamedSetting, describe_errors
from fedsim.recording.array_archives import check_sizes, open_regular, read_arrays, read_toml
from fedsim.recording.codec import Payload, encode
from fedsim.recording.manifest import Manifest, make_name
from fedsim.recording.observation import DataSpec, ModelSpec
from fedsim.recording.training import Training
from fedsim.recording.writer import Recorder, Reply

IMPORTED_CLIENT = "imported"
MAX_SIZE_RATIO = 4
"""Largest size of a file relative to the model's state dict: a factor of 2 for float64, and another 2 for unrelated tensors."""
SPARE_BYTES = 2**26


class ImportSettings(BaseModel):
    """Settings of an import: what the server knows besides the two state dicts.

    model, training, data: as in an experiment; the model may be `module:function`.
    defense, gradient, network, inputs: defenses of the update, the gradient, the network and the training examples, as in an
             experiment.
    num_examples: number of training examples that the client reported with its update, if any; most attacks need it.
    names:   maps a tensor's name in the files to its name in the model, if they differ.
    layout:  "torch", or "keras" for Keras, JAX and Flax, whose kernels have the shapes (height, width, in, out) and (in, out).
    flatten: for layout "keras", maps the model's name of a linear weight whose input is a flattened image to (C, H, W) of that
             image. Keras flattens images as (H, W, C), so that columns must be reordered; this cannot be seen from shapes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: NamedSetting
    training: Training
    data: DataSpec
    defense: str = ""
    gradient: str = "plain"
    network: str = ""
    inputs: str = ""
    num_examples: int | None = Field(default=None, gt=0)
    names: dict[str, str] = {}
    layout: Literal["torch", "keras"] = "torch"
    flatten: dict[str, tuple[int, int, int]] = {}

    @field_validator("data", mode="before")
    @classmethod
    def _check_data_keys(cls, value: Any) -> Any:
        known = [field.name for field in fields(DataSpec)]
        if unknown := [key for key in value if key not in known] if isinstance(value, dict) else []:
            raise ValueError(f"unknown key {unknown[0]!r}.{suggest_name(unknown[0], known)} Keys of data: {', '.join(known)}")
        return value

    @model_validator(mode="after")
    def _check_flatten(self) -> "ImportSettings":
        if self.flatten and self.layout != "keras":
            raise ValueError('flatten requires layout = "keras"; remove flatten, or set the layout')
        return self

    @classmethod
    def read(cls, path: Path, model: str | None = None) -> "ImportSettings":
        """Read settings from a TOML file. model: the model if the file names none; None for none.

        Raises ExperimentError if the file is missing or invalid; the message names the file and any wrong key.
        """
        try:
            raw = read_toml(path)
        except FileNotFoundError:
            raise ExperimentError(f"{path}: no such file; an example is deploy/import.toml") from None
        except ValueError as error:
            raise ExperimentError(str(error)) from None
        try:
            return cls.model_validate(raw if model is None else {"model": model, **raw})
        except ValidationError as error:
            raise ExperimentError(describe_errors(error, str(path), cls)) from None


def import_recording(before: Path, after: Path, settings: ImportSettings, out: Path) -> None:
    """Write `out/recording` with one observation of a client that was sent the state dict `before` and sent back `after`.

    The files are .safetensors, .npz, or .pt with a state dict; no code in them is executed. If any trained weight in either
    file is float64, the update is computed in float64 and stored in float32. If none is, both sets of weights are stored as they
    are.
    Raises ValueError, or FileNotFoundError for a missing file, and writes nothing, if a file cannot be read or does not fit the
    model, if both files hold the same weights, or if `out` holds a recording already.
    """
    if (out / "recording").exists():
        raise ValueError(f"{out} holds a recording already; choose another folder, or remove it with `fedsim delete {out}`")
    spec = ModelSpec(name=settings.model.name, arguments=settings.model.arguments, network=settings.network)
    model = models.build(spec, settings.data)
    models.check_loss(model, settings.training, settings.data)
    weights = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    state = model.state_dict()
    limit = SPARE_BYTES + MAX_SIZE_RATIO * sum(t.numel() * t.element_size() for t in state.values())
    sent, returned = (_fit_tensors(_read_state_dict(path, limit), state, weights, settings, path) for path in (before, after))
    start, payload = _make_payload({name: sent[name] for name in weights}, {name: returned[name] for name in weights})
    if all(torch.equal(sent[name], returned[name]) for name in weights):
        raise ValueError(f"{before} and {after} hold the same weights, so there is no update; give the weights before and after")
    manifest = Manifest(
        name=make_name(out.name),
        model=spec,
        data=settings.data,
        training=models.adopt_precision(model, models.require_mode(model, settings.training, settings.data)),
        defense=DefenseSpec.parse(settings.defense, learning_rate=settings.training.learning_rate),
        gradient=settings.gradient,
        inputs=settings.inputs,
        created=strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()),
        software={"torch": torch.__version__, "numpy": np.__version__},
    )
    reply = Reply(
        client=IMPORTED_CLIENT,
        node="0",
        payload=payload,
        buffers={name: t for name, t in returned.items() if name not in weights},
        num_examples=settings.num_examples,
        bytes=sum(t.numel() * t.element_size() for t in payload.tensors.values()),
    )
    recorder = Recorder(out / "recording", manifest)
    recorder.record_sent(1, start, {name: t for name, t in sent.items() if name not in weights})
    recorder.record_reply(1, reply)
    recorder.commit(1, [IMPORTED_CLIENT])


def _make_payload(sent: dict[str, Tensor], returned: dict[str, Tensor]) -> tuple[dict[str, Tensor], Payload]:
    """Return the weights sent and the payload: the weights returned or, if any is float64, the update in float32."""
    if not any(t.dtype is torch.float64 for t in (*sent.values(), *returned.values())):
        return sent, Payload(tensors=returned, codec="weights")
    update = {name: (returned[name].double() - sent[name].double()).float() for name in sent}
    return {name: t.float() for name, t in sent.items()}, encode(update)


def _read_state_dict(path: Path, limit: int) -> dict[str, Tensor]:
    """Read a state dict from .safetensors, .npz, .pt or .pth without executing code. Entries that are not tensors are left out.

    limit: largest size in bytes after unpacking of an .npz, .pt or .pth, since a small archive may unpack to a huge one.
    Raises FileNotFoundError if the file is missing, and ValueError if it cannot be read.
    """
    try:
        match path.suffix:
            case ".safetensors":
                with open_regular(path):  # reading a pipe would block
                    return load_file(path)
            case ".npz":
                return {name: torch.from_numpy(array) for name, array in read_arrays(path, limit=limit).items()}
            case ".pt" | ".pth":
                with open_regular(path) as file:
                    check_sizes(file, path, limit=limit)
                    file.seek(0)
                    loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
                if not isinstance(loaded, Mapping):
                    raise ValueError(f"{path} holds a {type(loaded).__name__} instead of a state dict; save model.state_dict()")
                tensors = {str(name): t.detach() for name, t in loaded.items() if isinstance(t, Tensor)}
                if not_dense := [n for n, t in tensors.items() if t.layout is not torch.strided or t.device.type != "cpu"]:
                    raise ValueError(
                        f"{path}: tensor {not_dense[0]!r} is sparse or on the meta device; save it as a dense tensor on the CPU"
                    )
                return tensors
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except UnpicklingError:  # torch.load's own message advises to execute the file
        raise ValueError(
            f"{path} is damaged, or holds code or objects besides tensors, which are not loaded for safety; save "
            "model.state_dict()"
        ) from None
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except Exception as error:  # the readers raise many types of errors on invalid files
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")
        raise ValueError(
            f"{path} cannot be read as a {path.suffix} file ({reason}); check that it may be read and is complete, or save the "
            "weights again"
        ) from None
    raise ValueError(f"{path}: unknown kind of file; give .safetensors, .npz or .pt")


def _fit_tensors(
    tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], weights: Collection[str], settings: ImportSettings, path: Path
) -> dict[str, Tensor]:
    """Return the file's tensors with the names and order of `state`, the model's state dict, and PyTorch's order of dimensions.

    weights: names of the trained parameters, which keep the dtype of the file. Buffers get the model's dtype. A missing counter
    of batch norm is taken from `state`.
    Raises ValueError for the first tensor that is missing, has another shape, is of another kind (floating-point, integer or
    boolean) than the model's, or holds NaN or infinity.
    """
    renamed = _rename_tensors(tensors, state, settings, path)
    fitted = {}
    for name, expected in state.items():
        if name not in renamed and name.endswith("num_batches_tracked"):  # only PyTorch's batch norm has this counter
            fitted[name] = expected
            continue
        if name not in renamed:
            have = ", ".join(sorted(renamed.keys() - state.keys())) or "none"
            raise ValueError(f"{path}: no tensor {name!r}; its other tensors: {have}; map the names in [names] of the settings")
        t = renamed[name]
        if settings.layout == "keras":
            t = _convert_kernel(t, settings.flatten.get(name), name, path)
        _check(t, expected, name, path)
        fitted[name] = t.contiguous() if name in weights else t.to(expected.dtype)
    return fitted


def _rename_tensors(
    tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], settings: ImportSettings, path: Path
) -> dict[str, Tensor]:
    """Return the file's tensors by the model's names, see `ImportSettings.names`.

    Raises ValueError if the settings name a tensor that the file or the model does not have, or two tensors get the same name.
    """
    for given_name, name in settings.names.items():
        if given_name not in tensors:
            raise ValueError(
                f"{path}: no tensor {given_name!r}, which [names] of the import settings gives for the model's {name!r}; the "
                f"file holds {', '.join(sorted(tensors)) or 'none'}; correct [names]"
            )
        if name not in state:
            raise ValueError(
                f"[names] of the import settings: the model has no tensor {name!r}, given for {given_name!r}; it has "
                f"{', '.join(state)}"
            )
    if unknown := [name for name in settings.flatten if name not in state]:
        raise ValueError(f"flatten: the model has no tensor {unknown[0]!r}; it has {', '.join(state)}")
    renamed = {settings.names.get(given_name, given_name): t for given_name, t in tensors.items()}
    if len(renamed) < len(tensors):
        given = [settings.names.get(given_name, given_name) for given_name in tensors]
        double = next(name for name in given if given.count(name) > 1)
        raise ValueError(f"{path}: the settings give two of its tensors the same name {double!r}; correct [names]")
    return renamed


def _convert_kernel(kernel: Tensor, flattened: tuple[int, int, int] | None, name: str, path: Path) -> Tensor:
    """Convert a matrix or 4-d kernel from the layout of Keras to that of PyTorch; return other tensors unchanged.

    flattened: (C, H, W) of the flattened image that is the layer's input, or None. Raises ValueError if it does not fit the
               kernel.
    """
    if flattened is None:
        return kernel.permute(3, 2, 0, 1) if kernel.ndim == 4 else kernel.t() if kernel.ndim == 2 else kernel
    c, h, w = flattened
    if kernel.ndim != 2 or len(kernel) != c * h * w:
        raise ValueError(
            f"{path}: {name!r} has shape {tuple(kernel.shape)}, but flatten = [{c}, {h}, {w}] means a matrix with {c * h * w} "
            "rows; correct flatten in the settings"
        )
    return kernel.t().reshape(-1, h, w, c).permute(0, 3, 1, 2).flatten(1)


def _check(t: Tensor, expected: Tensor, name: str, path: Path) -> None:
    """Raise ValueError if a tensor's shape or dtype differs from the model's, or the tensor holds NaN or infinity.

    Any floating-point type is accepted where the model has one. expected: the model's tensor of this name. path: file, for
    messages.
    """
    if t.shape != expected.shape:
        raise ValueError(
            f"{path}: {name!r} has shape {tuple(t.shape)}, but the model's has {tuple(expected.shape)}; correct model or "
            "layout in the settings"
        )
    if t.dtype is not expected.dtype and not (t.is_floating_point() and expected.is_floating_point()):
        raise ValueError(
            f"{path}: tensor {name!r} has type {t.dtype}, but the model's tensor has {expected.dtype}; convert it to this type "
            "and save the file again"
        )
    if not torch.isfinite(t).all():
        raise ValueError(f"{path}: {name!r} holds NaN or infinity, so it cannot be attacked")
