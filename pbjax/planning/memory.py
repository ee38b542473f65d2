"""Predicts the device memory that a split needs, from the bytes that its stages hold.

Weights, inputs and outputs are there all the time. The bytes that sub-batches hold beside them do
not depend on which one is ahead. Sub-batches that may overlap share no buffer: each has room for
the fullest of its stages. Those that take turns, without staggers, use the same buffers, while the
others keep only the inputs of their next block. `candidates` decides which splits fit a device.
"""

import math
from collections.abc import Sequence

from pbjax.planning.program_summary import ProgramSummary

# Bytes of sub-batches that may overlap, over the sum of their fullest stages: 1.22 as measured for
# BERT-Base, 0.97 to 1.13 for small models compiled for an H200 (docs/design/search.md).
TOGETHER = 1.25


def predicted_bytes(summary: ProgramSummary, sizes: Sequence[int], staggers: Sequence[int]) -> int:
    """Device memory of the program that runs a split.

    Args:
      summary: The program.
      sizes: Rows of each sub-batch; a single size means the program as it was given.
      staggers: How many stages each runs ahead; if all are 0 they take turns.
    """
    batch_size = sum(sizes)
    per_row = summary.input_bytes_per_row + summary.output_bytes_per_row
    always = summary.weight_bytes + batch_size * per_row
    if len(sizes) > 1:
        # Layers read stacked copies of their weights; the model's own stay in memory.
        always += summary.stacked_weight_bytes
    return math.ceil(always + _held_bytes(summary, sizes, staggers))


def _held_bytes(summary: ProgramSummary, sizes: Sequence[int], staggers: Sequence[int]) -> float:
    """The most bytes that sub-batches hold beside weights, inputs and outputs."""
    ends = [end.held_bytes_per_row if end else 0.0 for end in (summary.prologue, summary.epilogue)]
    block = max(stage.held_bytes_per_row for stage in summary.block)
    fullest = max(*ends, block + summary.waiting_bytes_per_row)
    batch_size, largest = sum(sizes), max(sizes)
    if len(sizes) == 1:
        return batch_size * fullest
    # Parts of the outputs stay in memory beside the joined outputs.
    parts = batch_size * summary.output_bytes_per_row
    if any(staggers):
        return TOGETHER * batch_size * fullest + parts
    between = summary.carried_bytes_per_row + summary.waiting_bytes_per_row
    in_turns = largest * fullest + (batch_size - largest) * between
    return max(in_turns, parts + largest * ends[1])
