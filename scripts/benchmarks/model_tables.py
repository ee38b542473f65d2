"""What profile_models.py measures: models' tables, and whole models beside their predictions."""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import jax

from models.presets import find_shape
from pbjax.device import find_device
from pbjax.files import write_atomically
from pbjax.graph.functional import functional
from pbjax.planning.profile_grid import grid
from pbjax.planning.profiling import Profile
from pbjax.planning.program_summary import ProgramSummary
from pbjax.planning.search import search
from pbjax.runtime.measured_programs import joined, milliseconds
from pbjax.runtime.phases import Phases
from pbjax.runtime.provenance import provenance_here
from pbjax.runtime.timing import time_alternately
from pbjax.text_tables import table_text
from pbjax.tuning.measured_table import prepare_table
from pbjax.tuning.offline_plan import best_split
from pbjax.tuning.preset_model import MEASURED_LAYERS, ForwardPass

from . import pool
from .peers.processes import Meter

BATCHES = {
    "vit-base": 256,
    "bert-base": 96,
    "conformer-l": 32,
    "gpt2-xl": 16,
    "bloom-7b1": 8,
    "llama3-8b": 8,
}
# Lowering attention by relative positions takes 14 s on one core, at each size and budget.
PROCESSES = {"conformer-l": 4}
SETTLING_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one process.

    Attributes:
      model: One of BATCHES.
      share: Which part of the table's sub-batches it measures; None to run the whole model.
      table: File of the model's table.
      start: time.time() when the script began.
    """

    model: str
    share: int | None
    table: Path
    start: float

    @property
    def asked(self) -> ForwardPass:
        """The forward pass."""
        return ForwardPass(model=self.model, batch_size=BATCHES[self.model])

    @property
    def part(self) -> str:
        """The part of the model, as it is printed."""
        return "the whole model" if self.share is None else f"share {self.share} of its table"

    @property
    def sizes(self) -> set[int]:
        """The sub-batches of its share, and the whole batch."""
        sizes = grid(BATCHES[self.model])
        return {*sizes[self.share :: PROCESSES.get(self.model, 1)], sizes[-1]}


def run(args: argparse.Namespace) -> None:
    """Measures the tables, and prints a line for each and a table of predictions."""
    start, meter = time.time(), Meter()
    jobs = [
        Job(model=name, share=share, table=args.out / f"{name}.json", start=start)
        for name in args.models
        for share in (*range(PROCESSES.get(name, 1)), *((None,) if args.programs else ()))
    ]
    summaries, programs, incomplete = {}, {}, set()
    limits = {"quiet": True, "prepare_within_s": args.ready_within}
    for job, result in pool.run(prepare, measure, jobs, len(jobs), **limits):
        if isinstance(result, str):
            text, incomplete = result, incomplete | {job.model}
        elif job.share is None:
            programs[job.model] = result | meter.between(*result.pop("between"))
            text = f"{milliseconds(result['median_s'])} ms a call"
        else:
            summaries[job.model], text = result
        print(f"{job.model}, {job.part}: {text}", flush=True)
    meter.stop()
    print(f"{len(summaries.keys() - incomplete)} tables, {time.time() - start:.0f} s")
    lines = [
        compare(job, summaries[job.model], programs[job.model])
        for job in jobs
        if job.share is None and job.model not in incomplete
    ]
    if lines:
        write(args.programs, lines)
        print(text_of(lines))


def prepare(job: Job):
    """Compiles the stages of a model, or the model."""
    device = find_device(jax.devices()[0].device_kind, num_cores=os.cpu_count() or 1)
    if job.share is None:
        ready = compile_program(job)
    else:
        phases = Phases()
        with phases.phase("analyse"):
            analysis, leaves = job.asked.filled(device)
        command = job.asked.command(device)
        table = prepare_table(analysis, leaves, job.table, phases, command, sizes=job.sizes)
        ready = phases, table
    print(f"{job.model}, {job.part}: ready after {time.time() - job.start:.0f} s", flush=True)
    return ready


def measure(job: Job, ready):
    """Measures a share of a table and says where the time went, or times the whole model."""
    if job.share is None:
        return time_program(ready)
    phases, table = ready
    if job.table.exists():  # what other shares have measured meanwhile
        table = replace(table, start=Profile.load(job.table).merge(table.start))
    found = table.measure(phases)
    seconds = ", ".join(f"{phase.name} {phase.seconds:.1f} s" for phase in phases.finished())
    rows, pairs = len(found.profile.rows), len(found.profile.corun)
    text = f"{rows} rows, {pairs} pairs, {found.rows_measured} new: {seconds}"
    layers = find_shape(job.model).config.num_layers - MEASURED_LAYERS
    return replace(found.summary, num_blocks=found.summary.num_blocks + layers), text


def compile_program(job: Job):
    """The whole model with random weights, as a call without arguments."""
    asked = job.asked
    shape = find_shape(asked.model, asked.dtype).without_head().filled()
    call = shape.call("forward", asked.batch_size, asked.length)
    model, inputs = functional(call.function), shape.values(call)
    weights, tree = jax.tree.flatten(model.params)

    def program(weights, *inputs):
        return model.apply(jax.tree.unflatten(tree, weights), *inputs)

    compiled = jax.jit(program).lower(weights, *inputs).compile()
    jax.block_until_ready(compiled(weights, *inputs))
    return partial(compiled, weights, *inputs)


def time_program(call) -> dict:
    """Seconds of a call in a long run, and when it was measured."""
    settled = time.perf_counter() + SETTLING_S
    while time.perf_counter() < settled:
        jax.block_until_ready([call() for _ in range(2)])
    began = time.time()
    (timing,) = time_alternately([call], lambda *_: None)
    return asdict(timing) | {"between": (began, time.time())}


def compare(job: Job, summary: ProgramSummary, measured: dict) -> dict:
    """Seconds that a table predicts, of the whole batch and its best split, and the measured."""
    asked = job.asked
    found = search(summary, Profile.load(job.table), asked.batch_size)
    predicted_s = found.by_count[1].prediction.makespan_s
    split = best_split(found)
    return {
        "model": asked.model,
        "batch_size": asked.batch_size,
        "length": asked.length,
        "predicted_s": predicted_s,
        "measured_s": measured["median_s"],
        "error": round(predicted_s / measured["median_s"] - 1, 4),
        "split": split.split.sizes if split else (),
        "split_predicted_s": split.prediction.makespan_s if split else None,
        **{key: measured[key] for key in measured if key != "median_s"},
    }


def write(path: Path, lines: list[dict]) -> None:
    """Writes the comparison with where it was measured."""
    command = " ".join(["python", *sys.argv])
    provenance = asdict(provenance_here(jax.devices()[0].device_kind, command))
    document = {"schema_version": 1, "provenance": provenance, "rows": lines}
    write_atomically(path, json.dumps(document, indent=1) + "\n")


def text_of(lines: list[dict]) -> str:
    """The comparison as a table."""
    rows = [
        (
            line["model"],
            milliseconds(line["predicted_s"]),
            milliseconds(line["measured_s"]),
            f"{line['error']:+.1%}",
            line.get("clock_mhz", "-"),
            f"{joined(line['split'])}: {line['predicted_s'] / line['split_predicted_s']:.3f}x",
        )
        for line in lines
    ]
    columns = ("model", "predicted", "measured", "error", "MHz", "best split, predicted")
    return table_text("ms of a call, back to back", columns, rows)
