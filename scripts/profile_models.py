#!/usr/bin/env python3
"""Measures the tables of the six models, at the sizes of the README, in one run on one GPU.

Every model has a process of its own. All compile at the same time; once all are ready they measure
one after the other. A file that is there is completed: delete it to measure all of its rows again.

    PYTHONPATH=. python scripts/profile_models.py --out profiles/nvidia_h200
"""

import argparse
import os
import time
from pathlib import Path

import jax
from kernel_cases.pool import run
from places import new_folder

from pbjax.device import find_device
from pbjax.forward_pass import ForwardPass
from pbjax.phases import Phases
from pbjax.tables import prepare_table

BATCHES = {
    "vit-base": 256,
    "bert-base": 96,
    "conformer-l": 32,
    "gpt2-xl": 16,
    "bloom-7b1": 8,
    "llama3-8b": 8,
}


def main() -> None:
    """Measures the tables and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--out", type=new_folder, required=True, help="folder of the tables")
    args = parser.parse_args()
    start = time.time()
    items = [(name, BATCHES[name], str(args.out), start) for name in args.models]
    for (name, *_), result in run(prepare, measure, items, len(items), quiet=True):
        print(f"{name:12} {result}", flush=True)
    print(f"{len(items)} tables, {time.time() - start:.0f} s")


def prepare(item):
    """Compiles the stages of a model."""
    name, batch, folder, start = item
    device = find_device(jax.devices()[0].device_kind, num_cores=os.cpu_count() or 1)
    asked = ForwardPass(model=name, batch_size=batch)
    phases = Phases()
    with phases.phase("analyse"):
        analysis, leaves = asked.filled(device)
    path = Path(folder) / f"{name}.json"
    ready = prepare_table(analysis, leaves, path, phases, asked.command(device))
    print(f"{name}: compiled after {time.time() - start:.0f} s", flush=True)
    return phases, ready


def measure(item, ready):
    """Measures them, and says where the time went."""
    phases, table = ready
    found = table.measure(phases)
    seconds = ", ".join(f"{phase.name} {phase.seconds:.1f} s" for phase in phases.finished())
    rows, pairs = len(found.profile.rows), len(found.profile.corun)
    return f"{rows} rows, {pairs} pairs, {found.rows_measured} new: {seconds}"


if __name__ == "__main__":
    main()
