"""Programs of the whole batch: as the model is written, in one loop, written out, as one graph."""

from collections.abc import Sequence
from dataclasses import replace

from pbjax.program.analysis import Analysis
from pbjax.runtime.compilation import ProgramSpec
from pbjax.runtime.execution import overlap_options

# More layers written out take minutes to compile.
MAX_LAYERS = 64


def whole_programs(
    analysis: Analysis, predicted_s: float | None = None, *, can_scan: bool = True
) -> tuple[ProgramSpec, ...]:
    """Programs of the whole batch.

    They are the model as it was given; the same with kernels, where fusion has found some; its
    layers written out where it scans over them, or in one loop where it does not; and on a GPU all
    of it as one graph, whose independent kernels may run at the same time.

    Args:
      analysis: The model.
      predicted_s: Predicted seconds of the batch with kernels.
      can_scan: Whether layers can be put into one loop.
    """
    size = analysis.batch.batch_size
    whole = ProgramSpec(sizes=(size,), staggers=(0,), predicted_s=predicted_s)
    found = [replace(whole, plain=True, predicted_s=None)] if analysis.fused else []
    found.append(whole)
    written_out = whole
    if 1 < analysis.summary.num_blocks <= MAX_LAYERS:
        if analysis.scanned:
            written_out = replace(whole, layers="unrolled")
            found.append(written_out)
        elif can_scan and not no_sub_batches(analysis):
            found.append(replace(whole, layers="scanned"))
    # A loop's body is a graph of its own.
    if (options := overlap_options()) and not (analysis.scanned and written_out is whole):
        found.append(replace(written_out, compiler_options=options))
    return tuple(found)


def as_written(wholes: Sequence[ProgramSpec]) -> tuple[ProgramSpec, ...]:
    """The programs that run layers as the model writes them, to compare a given split with."""
    return tuple(spec for spec in wholes if not spec.variant)


def no_sub_batches(analysis: Analysis) -> str:
    """Why a batch has no sub-batches whatever they take; empty if it has some."""
    if analysis.batch.batch_size == 1:
        return "a batch of one row cannot be split"
    if analysis.unsplittable:
        return f"the batch cannot be split: {analysis.unsplittable}"
    return ""
