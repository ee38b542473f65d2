"""The forward pass of a model known by name, taken apart: in shapes alone, or with random weights.

A model is a preset's name or a folder with a config.json; it calls kernels where the device has
them, and ends with its last hidden states. `models` makes it, which nothing here imports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from jaxtyping import Array

from pbjax.device import Device
from pbjax.program.analysis import Analysis, analyse

# A block is measured once however often it repeats: three tell it from what stands around it.
MEASURED_LAYERS = 3

# Tokens or frames of a row where none are given: those of the README's rows, the same for all but
# BERT; an image has one size.
_LENGTHS = {"bert-base": 384, "vit-base": None, "vit-large": None}
_USUAL_LENGTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """A forward pass of a preset.

    Attributes:
      model: Name of a preset, or a folder.
      batch_size: Rows.
      seq_len: Tokens or frames of a row; None for images, and for the usual length.
      dtype: Dtype of weights and activations.
    """

    model: str
    batch_size: int
    seq_len: int | None = None
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Name of the model and of its table's file."""
        return Path(self.model).name

    @property
    def length(self) -> int | None:
        """The given length or the usual one."""
        return self.seq_len or _LENGTHS.get(self.model, _USUAL_LENGTH)

    def command(self, device: Device, out: str | Path | None = None) -> str:
        """What to run on a device to measure its table.

        Args:
          device: The device.
          out: The table; of the model's name in the current folder if None.
        """
        text = f"pbjax profile --device {device.slug} --model {self.model}"
        text += f" --batch {self.batch_size}"
        text += "" if self.length is None else f" --seq {self.length}"
        text += "" if self.dtype == "bfloat16" else f" --dtype {self.dtype}"
        return f"{text} --out {out or f'{self.name}.json'}"

    def in_shapes(self, device: Device) -> Analysis:
        """Takes the whole model apart as for a device that need not be there."""
        presets = import_module("models.presets")
        with presets.traced_for(device.kind, device.num_sms):
            shape = presets.find_shape(self.model, self.dtype).without_head().calling_kernels()
            call = shape.call("forward", self.batch_size, self.length)
            return analyse(call.function, call.inputs, device=device)

    def filled(self, device: Device) -> tuple[Analysis, Sequence[Array]]:
        """Takes the model apart with a few layers of random weights, and makes inputs of it.

        Args:
          device: The first device of JAX.

        Returns:
          The analysis, whose stages are those of the whole model; and the leaves of the inputs.
        """
        presets = import_module("models.presets")
        shape = presets.find_shape(self.model, self.dtype, MEASURED_LAYERS).without_head().filled()
        call = shape.call("forward", self.batch_size, self.length)
        inputs = shape.values(call)
        return analyse(call.function, inputs, device=device), list(inputs)
