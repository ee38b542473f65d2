"""How long `optimize` will take, from what can be counted before it compiles or measures.

Compiling goes by the operations of all programs, measuring by roofline seconds of what is timed.
Both scale with the machine and with what else it does now: how fast it compiles one small program
tells that.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from pbjax.graph.classify import class_shares
from pbjax.planning.profile_grid import Run, paired_runs, single_runs
from pbjax.planning.profiling import Profile, missing_pairs, missing_runs
from pbjax.program.analysis import Analysis
from pbjax.runtime.provenance import provenance_here
from pbjax.runtime.timing import MIN_SAMPLE_S, SAMPLES
from pbjax.tuning.whole_batch import whole_programs

# Compiling, in compilations of the probe for each operation on one core: 34 CPU seconds for 1,465
# operations in 33 programs of a BERT with two layers, and 0.08 for the probe.
PROBES_PER_OPERATION = 0.3
# The probe on an idle core of the machine that the next figure is of, an AMD EPYC.
PROBE_S = 0.06
# Seconds of a call over the sum of its operations' roofline seconds: XLA fuses them. MiniLM's
# 96 x 64 take 0.6 to 0.7 s of 1.84.
SECONDS_PER_ROOFLINE_SECOND = 0.37
# Calls of a whole program: two compare outputs, one is not counted, one tells how many to queue.
OTHER_CALLS = 4
# Programs of sub-batches that compete: splits of two and three, and one after the other.
SPLIT_PROGRAMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What there is to do.

    Attributes:
      stage_programs: How many programs of stages are compiled.
      stage_operations: How many operations these have together.
      stage_s: Roofline seconds of each stage, or pair of stages, that is timed.
      programs: How many programs of the batch are compiled, compared and timed.
      operations: How many operations each of these has.
      call_s: Roofline seconds of a call of the batch.
    """

    stage_programs: int
    stage_operations: int
    stage_s: tuple[float, ...]
    programs: int
    operations: int
    call_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The seconds that `optimize` will take after its analysis, right to a factor of two.

    Attributes:
      seconds: The seconds.
      work: What they are for.
    """

    seconds: float
    work: Work

    def __str__(self) -> str:
        """One line."""
        work = self.work
        return (
            f"about {_rounded(self.seconds)}: {work.stage_programs + work.programs} programs to "
            f"compile, {len(work.stage_s)} stages to measure"
        )


def estimate(work: Work, probe_s: float, num_cores: int) -> Estimate:
    """The seconds of some work.

    Args:
      work: What there is to do.
      probe_s: Seconds in which the probe compiles now.
      num_cores: Cores that compile at the same time.
    """
    operations = work.stage_operations + work.programs * work.operations
    compiling = PROBES_PER_OPERATION * probe_s * operations / num_cores
    pace = SECONDS_PER_ROOFLINE_SECOND * probe_s / PROBE_S
    stages = sum(timing_s(pace * each, 2) for each in work.stage_s)
    programs = work.programs * timing_s(pace * work.call_s, OTHER_CALLS)
    return Estimate(seconds=compiling + stages + programs, work=work)


def timing_s(call_s: float, other_calls: int) -> float:
    """Seconds that timing a function takes.

    Args:
      call_s: Seconds of a call.
      other_calls: Calls beside those that are counted.
    """
    return SAMPLES * max(call_s, MIN_SAMPLE_S) + other_calls * call_s


def work_of(analysis: Analysis, profile: Path | None, *, planned: bool = False) -> Work:
    """Counts the work of `optimize`.

    Args:
      analysis: The model.
      profile: The measured table's file, whose rows are not measured again; None for none.
      planned: Whether a plan decides, so that nothing is measured.
    """
    splits = analysis.batch.batch_size > 1 and not analysis.unsplittable
    runs, pairs = ((), ()) if planned or not splits else _missing(analysis, profile)
    total = sum(share.seconds for share in class_shares(analysis.labels))
    block = len(analysis.summary.block)
    operations = {
        info.fingerprint: len(stage.operations)
        for info, stage in zip(analysis.summary.block, analysis.program.stages, strict=True)
    }
    mean = sum(operations.values()) // block
    timed = [[run] for run in runs] + [list(pair) for pair in pairs]
    every = [run for group in timed for run in group]
    return Work(
        stage_programs=len(timed),
        stage_operations=sum(operations.get(run.stage.fingerprint, mean) for run in every),
        stage_s=tuple(_roofline_s(analysis, total, group) for group in timed),
        programs=2 if planned else len(whole_programs(analysis)) + splits * SPLIT_PROGRAMS,
        operations=len(analysis.graph.operations),
        call_s=0.0 if planned else total,
    )


def probe_s() -> float:
    """Seconds in which this machine compiles a small program now; the first one is not counted."""
    return min(_compile(seed) for seed in range(3))


def _compile(seed: int) -> float:
    def probe(x, w):
        return jax.nn.gelu(jax.nn.softmax(x @ w + seed) @ w).sum(0)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    start = time.perf_counter()
    jax.jit(probe).lower(shape, shape).compile()
    return time.perf_counter() - start


def _missing(
    analysis: Analysis, profile: Path | None
) -> tuple[tuple[Run, ...], tuple[tuple[Run, Run], ...]]:
    known = profile is not None and profile.exists()
    table = (
        Profile.load(profile)
        if profile is not None and known
        else Profile(provenance=provenance_here(analysis.device.kind, "estimate"))
    )
    wanted = analysis.summary, analysis.batch.batch_size, analysis.device.num_sms, ()
    return (
        missing_runs(table, single_runs(*wanted)),
        missing_pairs(table, paired_runs(*wanted)),
    )


def _roofline_s(analysis: Analysis, total_s: float, runs: Sequence[Run]) -> float:
    """The share of stages in a call's seconds, by their FLOPs."""
    summary, batch = analysis.summary, analysis.batch.batch_size
    ends = [end for end in (summary.prologue, summary.epilogue) if end is not None]
    flops = sum(stage.flops_per_row for stage in ends)
    flops += summary.num_blocks * sum(stage.flops_per_row for stage in summary.block)
    return sum(total_s * run.stage.flops_per_row / max(flops, 1) * run.size / batch for run in runs)


def num_cores() -> int:
    """Cores that programs compile on."""
    return os.cpu_count() or 1


def _rounded(seconds: float) -> str:
    """Seconds to the precision that they are known to."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{round(seconds / 60)} minutes"
