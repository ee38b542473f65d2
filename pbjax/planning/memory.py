"""Device memory that a split is predicted to need, from what its stages hold.

Weights, inputs and outputs are there all the time. What sub-batches hold beside them does not
depend on who is ahead of whom. Sub-batches that may overlap share no buffer, so that each has room
for the fullest of its stages. Those that take turns, without staggers, use the same buffers, while
the others keep only what their next block reads. Which candidates fit a device is decided in
`candidates`.
"""

import math
from collections.abc import Sequence

from pbjax.planning.program_summary import ProgramSummary

# What sub-batches that may overlap take over what the fullest stage of each holds: measured of
# BERT-Base it is 1.22, of small models compiled for an H200 0.97 to 1.13 (docs/design/search.md).
TOGETHER = 1.25


def predicted_bytes(summary: ProgramSummary, sizes: Sequence[int], staggers: Sequence[int]) -> int:
    """Device memory of the program that runs a split.

    Args:
      summary: What it runs.
      sizes: Rows of each sub-batch; a single one is the program as it was given.
      staggers: How many stages each runs ahead; without any they take turns.
    """
    batch_size = sum(sizes)
    per_row = summary.input_bytes_per_row + summary.output_bytes_per_row
    always = summary.weight_bytes + batch_size * per_row
    if len(sizes) > 1:
        # Layers read copies of their weights, stacked, beside the model's own.
        always += summary.stacked_weight_bytes
    return math.ceil(always + _held_bytes(summary, sizes, staggers))


def _held_bytes(summary: ProgramSummary, sizes: Sequence[int], staggers: Sequence[int]) -> float:
    """Bytes of what sub-batches hold beside weights, inputs and outputs, at most."""
    ends = [end.held_bytes_per_row if end else 0.0 for end in (summary.prologue, summary.epilogue)]
    block = max(stage.held_bytes_per_row for stage in summary.block)
    fullest = max(*ends, block + summary.waiting_bytes_per_row)
    batch_size, largest = sum(sizes), max(sizes)
    if len(sizes) == 1:
        return batch_size * fullest
    # Parts of the outputs are there beside the outputs that they are joined to.
    parts = batch_size * summary.output_bytes_per_row
    if any(staggers):
        return TOGETHER * batch_size * fullest + parts
    between = summary.carried_bytes_per_row + summary.waiting_bytes_per_row
    in_turns = largest * fullest + (batch_size - largest) * between
    return max(in_turns, parts + largest * ends[1])
