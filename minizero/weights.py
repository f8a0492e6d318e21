"""How do weights alone go to and from other programs?

    save_weights(model, "weights.safetensors")      torch_model.load_state_dict(safetensors.torch.load_file(...))
    load_weights(model, "weights.safetensors")      safetensors.torch.save_file(torch_model.state_dict(), ...)

Names and shapes must be the same on both sides; our `Linear` and `Embedding` name and lay out their weights as
PyTorch does (`LayerNorm` calls its weight `gain`). `load_weights` takes a checkpoint that `engine.save` wrote, too:
its weights are such a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .backend import to_host, xp
from .checkpoint import WEIGHTS, newest
from .nn import Module
from .parameter import Parameter
from .tensor_file import CheckpointError, read_table, refuse_differences

FLOATS = ("F32", "F64", "BF16", "F16")


def save_weights(model: Module, path: str | Path) -> None:
    """Write the weights of a model that no engine has wrapped to a safetensors file. (`engine.save` is for the others.)

    A parameter that is used in several places has one tensor, under the first of its names.
    Raises CheckpointError where the file cannot be written; one that was there before is left as it was.
    """
    check_model("save_weights", model)
    if any(p.unit for p in model.parameters()):
        raise ValueError("save_weights: this model is wrapped by an engine: engine.save writes its weights")
    if not model._materialised:
        model.materialise()
    arrays = {name: np.ascontiguousarray(to_host(p.data)).reshape(p.shape) for name, p in model.named_parameters()}
    beside = Path(f"{path}.saving")
    try:
        save_file(arrays, beside, metadata={"format": "pt"})
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"save_weights: {path} cannot be written: {error}") from None


def load_weights(model: Module, path: str | Path) -> None:
    """Give a model the weights in a safetensors file, or in a checkpoint, or in the latest checkpoint of a directory.

    The model has no engine yet: wrap it afterwards. Values are cast to the dtype of the model, as torch does. A
    parameter that is used in several places is found under any of its names.
    Raises CheckpointError, naming tensors, where names or shapes differ; nothing has changed then.
    """
    check_model("load_weights", model)
    if any(p.holders for p in model.parameters()):
        raise RuntimeError("load_weights: a forward has used these weights, and its backward has not run: run it, or "
                           "drop its result, first")  # fmt: skip
    if any(p.unit for p in model.parameters()):
        raise ValueError("load_weights: this model is wrapped by an engine: load weights before wrapping, "
                         "or a whole checkpoint with engine.load")  # fmt: skip
    file = newest(path) / WEIGHTS if Path(path).is_dir() else Path(path)
    table = read_table(file)
    aliases: dict[Parameter, list[str]] = {}
    for name, parameter in every_name(model):
        aliases.setdefault(parameter, []).append(name)
    found = {p: [name for name in names if name in table] or names[:1] for p, names in aliases.items()}
    shapes = {name: (p.shape,) for p, names in found.items() for name in names}
    refuse_differences(file, shapes, {name: (shape,) for name, (_, shape) in table.items()})
    strange = [name for name, (code, _) in table.items() if code not in FLOATS]
    if strange:
        raise CheckpointError(f"{file} does not fit: {strange[0]} is {table[strange[0]][0]}, not one of {FLOATS}")
    arrays = {}
    with safe_open(file, "np") as tensors:
        for parameter, names in found.items():
            first, *others = (tensors.get_tensor(name) for name in names)
            if any(other.tobytes() != first.tobytes() for other in others):
                raise CheckpointError(f"{file} does not fit: {' and '.join(names)} are one parameter in this model, "
                                      "but differ there")  # fmt: skip
            arrays[parameter] = xp.asarray(first.astype(parameter.dtype))
    model.name_parameters()
    for parameter, array in arrays.items():
        parameter.bind(array)


def check_model(name: str, model: Module) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"{name}: needs an nn.Module that no engine has wrapped, not {type(model).__name__}")


def every_name(module: Module, prefix: str = "", above: tuple[Module, ...] = ()) -> Iterator[tuple[str, Parameter]]:
    """All parameters with all their names: one that is shared comes several times, as in a torch state_dict."""
    for name, parameter in module._members(Parameter):
        yield f"{prefix}{name}", parameter
    for name, child in module._members(Module):
        if child not in above:
            yield from every_name(child, f"{prefix}{name}.", (*above, module))
