"""A model's folder: what a command can do with it before and after its weights are read."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pbjax.errors import InputError

MB = 1_000_000
ENCODERS = "a text encoder, such as a BERT,"


@runtime_checkable
class Shape(Protocol):
    """A model without its weights; `models` makes it, which nothing here imports."""

    @property
    def config(self) -> Any:
        """Its sizes."""

    @property
    def module(self) -> Any:
        """The module, of shapes and dtypes or with weights."""

    @property
    def phases(self) -> tuple[str, ...]:
        """What a call of it can do."""
        ...

    def call(self, phase: str, batch_size: int, seq_len: int | None, new_tokens: int = 1) -> Any:
        """A call of it in shapes."""

    def with_layers(self, num_layers: int) -> "Shape":
        """The same with another number of layers."""
        ...

    def calling_kernels(self) -> "Shape":
        """The same with the kernels of the device that is traced for."""
        ...

    def filled(self) -> "Shape":
        """The same with random weights and the kernels of this device."""
        ...

    def values(self, call: Any) -> tuple[object, ...]:
        """Random inputs of a call."""
        ...


def encodes_text(shape: Shape) -> bool:
    """Whether it is an encoder of texts."""
    return hasattr(shape.module, "packed_hidden_state")


def find_folder(folder: Path, asked: str, fits: Callable[[Shape], bool], allowed: str) -> Shape:
    """The model of a folder without its weights: what is of no use is refused before they are read.

    Args:
      folder: A Hugging Face folder, or one of `pbjax convert`.
      asked: The command, for the message.
      fits: Whether the command can do anything with a model.
      allowed: Models of which that is so, for the message.

    Raises:
      InputError: It is another model.
      CheckpointError: The folder has no configuration, or one that is not supported.
    """
    import_module("models.hf_folder").find_folder(folder)  # Here the name of a preset is none.
    shape = import_module("models.presets").find_shape(str(folder.absolute()))
    if not fits(shape):
        raise InputError(
            f"{asked}({folder}): a {type(shape.module).__name__}; {allowed} is allowed; give the "
            "folder of such a model"
        )
    return shape


def load(folder: Path, dtype: str | None):
    """The model of a folder with its weights; programs that it makes are kept from then on."""
    from pbjax.progress import ProgressPrinter
    from pbjax.runtime.program_cache import keep_programs

    keep_programs()
    with ProgressPrinter() as progress:
        return import_module("models").load(
            folder,
            dtype,
            progress=lambda done, total: progress("load", done // MB, total // MB, "MB"),
        )


def trace(module, *inputs) -> None:
    """Has a model without weights refuse inputs that it cannot take."""
    import jax

    from pbjax.graph.functional import functional

    function = functional(module)
    jax.eval_shape(function.apply, function.params, *inputs)


def run(model, *inputs):
    """The model's output by one compiled program."""
    import jax

    from pbjax.graph.functional import functional

    function = functional(model)
    return jax.jit(function.apply)(function.params, *inputs)
