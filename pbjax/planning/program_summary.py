"""A program as plain data, for prediction and search."""

from dataclasses import dataclass
from typing import Literal

from pbjax.device import ResourceClass
from pbjax.errors import InputError

# How a program runs equal layers: as the model writes them, in one loop, or one after the other.
type Layers = Literal["as given", "scanned", "unrolled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInfo:
    """A stage as plain data; its operations stay in `stages`.

    Attributes:
      name: Name for tables and messages; equal stages of a program may differ in nothing else.
      fingerprint: 12 hex digits; equal for equal operations on equal shapes and dtypes, whatever
        the batch size. Stages with one fingerprint are measured once.
      resource: The resource that bounds the stage.
      dtype: Dtype of its main input.
      shape: Shape of its main input without the batch axis.
      flops_per_row: FLOPs for one row of the batch, transcendental functions among them.
      bytes_per_row: Bytes of activations read and written for one row of the batch.
      weight_bytes: Bytes of weights read in one call, whatever the batch size.
      contraction_flops_per_row: FLOPs of contractions among flops_per_row.
      held_bytes_per_row: Bytes of activations in memory while the stage runs, at most, for one row
        of the batch: its own, and those of its block that wait for a later stage; inputs and
        outputs of the program do not count.
    """

    name: str
    fingerprint: str
    resource: ResourceClass
    dtype: str
    shape: tuple[int, ...]
    flops_per_row: float
    bytes_per_row: float
    weight_bytes: int
    contraction_flops_per_row: float = 0.0
    held_bytes_per_row: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSummary:
    """A program as plain data: prologue, num_blocks times the block's stages, epilogue.

    Attributes:
      prologue: The stage before the blocks; None if there is none.
      block: The stages of one block.
      epilogue: The stage after the blocks; None if there is none.
      num_blocks: How often the block repeats.
      weight_bytes: Bytes of all weights, each once.
      stacked_weight_bytes: Bytes of the layers' weights that a split program holds a second time,
        stacked.
      input_bytes_per_row: Bytes of a call's inputs for one row of the batch.
      output_bytes_per_row: Bytes of a call's outputs for one row.
      carried_bytes_per_row: Bytes that each block hands to the next, for one row: a part of what
        its first stage holds.
      waiting_bytes_per_row: Bytes that wait in memory while the blocks run, for one row: for the
        epilogue, or to be read by every block.
    """

    prologue: StageInfo | None
    block: tuple[StageInfo, ...]
    epilogue: StageInfo | None
    num_blocks: int
    weight_bytes: int = 0
    stacked_weight_bytes: int = 0
    input_bytes_per_row: float = 0.0
    output_bytes_per_row: float = 0.0
    carried_bytes_per_row: float = 0.0
    waiting_bytes_per_row: float = 0.0

    def __post_init__(self):
        """Refuses a program without stages."""
        if not self.block or self.num_blocks < 1:
            raise InputError(
                f"ProgramSummary: {self.num_blocks} blocks of {len(self.block)} stages; 1 or more "
                "of both are allowed; put a program without repetition into one block"
            )

    @property
    def stages(self) -> tuple[StageInfo, ...]:
        """Each different stage once, by fingerprint, in program order: what must be measured."""
        every = (self.prologue, *self.block, self.epilogue)
        first: dict[str, StageInfo] = {}
        for stage in every:
            if stage is not None:
                first.setdefault(stage.fingerprint, stage)
        return tuple(first.values())

    @property
    def num_stages_total(self) -> int:
        """How many stages one sub-batch runs through."""
        ends = (self.prologue is not None) + (self.epilogue is not None)
        return ends + self.num_blocks * len(self.block)
