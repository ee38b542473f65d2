"""What MODEL of `pbjax optimize` names: a folder, a preset, or a function that makes a model."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pbjax.cli.model_folder import MB, Shape
from pbjax.errors import InputError

if TYPE_CHECKING:
    from pbjax.graph.functional import Model

FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model that is known, and neither read nor made yet.

    Attributes:
      name: The model as it was named.
      shape: The model without weights; None for a factory, whose model is known once it is called.
      folder: Where weights, tokenizer and settings lie; None for a preset and for a factory.
      factory: What makes the model; None for a folder and for a preset.
    """

    name: str
    shape: Shape | None = None
    folder: Path | None = None
    factory: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that can run.

    Attributes:
      model: The model.
      inputs: Example inputs that its factory gave with it; None if none came.
    """

    model: "Model"
    inputs: tuple[object, ...] | None = None


def find_source(name: str, dtype: str | None) -> Source:
    """Finds what a name stands for, by its configuration alone.

    Args:
      name: A preset's name, a folder of Hugging Face's or of `pbjax convert`, or module:function.
      dtype: Dtype of weights and activations; None for the stored one, and bfloat16 of a preset.

    Raises:
      InputError: There is no such module or function, or a dtype is given for its model.
      CheckpointError: It is neither a preset nor a folder with a configuration that is supported.
    """
    if FACTORY.fullmatch(name) and not Path(name).exists():
        if dtype is not None:
            raise InputError(
                f"--dtype {dtype}: {name} makes the model, of dtypes of its own; a dtype is "
                "allowed for presets and folders; leave out --dtype"
            )
        return Source(name=name, factory=_factory(name))
    presets = import_module("models.presets")
    shape = presets.find_shape(name, dtype or "bfloat16")
    return Source(name=name, shape=shape, folder=None if name in presets.PRESETS else Path(name))


def load_source(
    source: Source,
    dtype: str | None,
    say: Callable[[str], None],
    progress: Callable[[str, int, int, str], None],
) -> Loaded:
    """Reads a folder's weights, draws a preset's, or calls the function that makes a model.

    Args:
      source: The model.
      dtype: Dtype of weights and activations; None for the stored one.
      say: Takes lines about a folder.
      progress: Called as progress(phase, done, total, item).
    """
    if source.factory is not None:
        return _made(source.name, source.factory())
    if source.folder is None:
        assert source.shape is not None
        return Loaded(model=source.shape.filled().module)
    model = import_module("models").load(
        source.folder,
        dtype,
        verify=True,
        report=say,
        progress=lambda done, total: progress("load", done // MB, total // MB, "MB"),
    )
    return Loaded(model=model)


def _made(name: str, made: Any) -> Loaded:
    """The model, or the model and its inputs, that a function returned."""
    if not isinstance(made, tuple):
        return Loaded(model=made)
    if len(made) == 2 and isinstance(made[1], tuple | list):
        return Loaded(model=made[0], inputs=tuple(made[1]))
    raise InputError(
        f"{name}: it returned a tuple of {len(made)}; a model, or a model and a tuple of its "
        "inputs, is allowed; return (model, (input, ...))"
    )


def _factory(name: str) -> Callable[[], Any]:
    """The function that module:function names; modules of the current folder are found first."""
    module, _, function = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(import_module(module), function, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # It is the module that lacks something.
        raise InputError(
            f"{name}: no module {error.name!r} in {here} or among what is installed; "
            "module:function is allowed; run pbjax in the module's folder"
        ) from error
    if not callable(found):
        what = "nothing" if found is None else f"a {type(found).__name__}"
        raise InputError(
            f"{name}: {function} is {what} in {module}; a function without arguments that returns "
            "a model is allowed; name one"
        )
    return found
