"""What bench_kernels.py times: kernels and opponents in turn, by device time and in long runs."""

import argparse
import datetime
import functools
import json
import statistics
import subprocess
import sys
import time

from . import pool
from .energy import Meter
from .kernel_cases import load_cases

ROUNDS, LAUNCHES = 5, 3
TURNS, WARM_S, SUSTAINED_S = 2, 0.15, 0.4  # Of a long run: each of kernel and opponents in turn.
# Calls of one program in a long run, and programs between two looks at the clock: the host takes
# up to 0.25 ms to start a program, longer than many kernels run.
TOGETHER, PROGRAMS = 8, 3
ROTATE_BYTES = 240 << 20  # Four times the L2 cache of an H200.
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark, prints one table, and writes it as JSON."""
    pool.require_gpu()
    kernels, start = tuple(args.kernels), time.time()
    cases = load_cases(kernels, args.pattern)
    items = [i for i, case in enumerate(cases) if case.opponents]
    prepare = functools.partial(_prepare, kernels, args.pattern, args.sustained)
    rows, provenance = [], {}
    for index, result in pool.run(prepare, _measure, items, args.workers, quiet=True):
        if isinstance(result, str):
            print(f"{cases[index].kernel} {cases[index].name} FAILED {result}", flush=True)
            continue
        measured, provenance = result
        rows += _rows(cases[index], measured)
        for row in rows[-len(cases[index].opponents) :]:
            print(_line(row), flush=True)
    provenance |= {
        "commit": args.commit or _commit(),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }
    rows.sort(key=lambda row: (row["kernel"], row["case"], row["opponent"]))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        table = {"schema_version": 1, "provenance": provenance, "rows": rows}
        args.out.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{len(rows)} rows, {time.time() - start:.0f} s; {json.dumps(provenance)}")


def _prepare(kernels, pattern, sustained, index):
    import jax

    case = load_cases(kernels, pattern)[index]
    make = jax.jit(case.make).lower(jax.random.key(0)).compile()
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    functions = {"ours": case.run, **case.opponents}

    def compile_(f, *shapes):
        return jax.jit(f, compiler_options=COMPILER_OPTIONS).lower(*shapes).compile()

    compiled = {name: compile_(f, *shapes) for name, f in functions.items()}
    long_runs = {}
    if case.sustained or sustained:
        long_runs = {
            name: compile_(lambda sets, f=f: [f(*one) for one in sets], [shapes] * TOGETHER)
            for name, f in functions.items()
        }
    return case, make, compiled, long_runs


def _measure(_, prepared):
    """Returns {name: {"device": seconds, ...}} and the provenance of the device."""
    import jax

    case, make, compiled, long_runs = prepared
    num_sets = max(1, min(4, -(-ROTATE_BYTES // case.num_bytes)))
    sets = [make(jax.random.key(i)) for i in range(num_sets)]
    times = {name: [] for name in compiled}
    for _ in range(ROUNDS):
        for name, function in compiled.items():
            times[name] += _device_seconds(function, sets)
    measured = {name: {"device": statistics.median(t)} for name, t in times.items()}
    for name, found in _sustained(long_runs, sets).items():
        measured[name] |= found
    client = jax.devices()[0].client
    provenance = {
        "device_kind": jax.devices()[0].device_kind,
        "platform_version": " ".join(client.platform_version.split()),
        "jax": jax.__version__,
    }
    return measured, provenance


def _device_seconds(function, sets) -> list[float]:
    """Device time of LAUNCHES calls, after one that is not counted."""
    import jax
    from jax._src.lib import (
        mosaic_gpu,
    )  # private: CUPTI has no public entry that spares the warm-up

    cupti = mosaic_gpu._mosaic_gpu_ext
    jax.block_until_ready(function(*sets[-1]))
    cupti._cupti_init()
    try:
        for i in range(LAUNCHES):
            result = function(*sets[i % len(sets)])
        jax.block_until_ready(result)
    finally:
        launches = cupti._cupti_get_timings(False)
    per_call = len(launches) // LAUNCHES
    milliseconds = [t for _, t in launches]
    return [1e-3 * sum(milliseconds[i * per_call : (i + 1) * per_call]) for i in range(LAUNCHES)]


def _sustained(long_runs, sets) -> dict[str, dict[str, float]]:
    """Wall seconds and joules of a call, and the clock in MHz, while calls follow each other."""
    import jax

    together = [sets[i % len(sets)] for i in range(TOGETHER)]
    totals = {name: (0, 0.0, 0.0) for name in long_runs}
    clocks = {name: [] for name in long_runs}
    meter = Meter() if long_runs else None

    def calls_for(function, least_s: float) -> tuple[int, list[int]]:
        calls, found, start = 0, [], time.perf_counter()
        while time.perf_counter() - start < least_s:
            for _ in range(PROGRAMS):
                result = function(together)
            found.append(meter.read().clock_mhz)
            jax.block_until_ready(result)
            calls += PROGRAMS * TOGETHER
        return calls, found

    for _ in range(TURNS):
        for name, function in long_runs.items():
            calls_for(function, WARM_S)
            joules, start = meter.read().joules, time.perf_counter()
            calls, found = calls_for(function, SUSTAINED_S)
            measured = (calls, time.perf_counter() - start, meter.read().joules - joules)
            totals[name] = tuple(a + b for a, b in zip(totals[name], measured, strict=True))
            clocks[name] += found
    return {
        name: {
            "wall": seconds / calls,
            "joules": joules / calls,
            "mhz": statistics.median(clocks[name]),
        }
        for name, (calls, seconds, joules) in totals.items()
    }


def _rows(case, measured) -> list[dict]:
    ours = measured["ours"]
    rows = []
    for opponent in case.opponents:
        theirs = measured[opponent]
        row = {
            "kernel": case.kernel,
            "case": case.name,
            "dtype": case.dtype,
            "ours_s": float(f"{ours['device']:.4g}"),
            "opponent": opponent,
            "opponent_s": float(f"{theirs['device']:.4g}"),
            "speedup": round(theirs["device"] / ours["device"], 3),
            "bound_s": float(f"{case.bound_s:.4g}"),
            "share_of_bound": round(case.bound_s / ours["device"], 3),
            "flops_per_s": float(f"{case.flops / ours['device']:.4g}"),
            "bytes_per_s": float(f"{case.num_bytes / ours['device']:.4g}"),
        }
        if "wall" in ours:
            row |= {
                f"{side}_{quantity}": float(f"{found[key]:.4g}")
                for side, found in (("ours", ours), ("opponent", theirs))
                for key, quantity in (("wall", "wall_s"), ("joules", "joules"), ("mhz", "mhz"))
            }
            row["speedup_wall"] = round(theirs["wall"] / ours["wall"], 3)
        rows.append(row)
    return rows


def _line(row) -> str:
    rate = (
        f"{row['flops_per_s'] / 1e12:5.0f} TFLOP/s"
        if row["flops_per_s"]
        else f"{row['bytes_per_s'] / 1e12:5.2f} TB/s   "
    )
    wall = ""
    if "speedup_wall" in row:
        wall = f", sustained {row['speedup_wall']:.3f}x: " + " against ".join(
            f"{row[f'{side}_wall_s'] * 1e6:.0f} us, {row[f'{side}_joules']:.2f} J, "
            f"{row[f'{side}_joules'] / row[f'{side}_wall_s']:.0f} W, {row[f'{side}_mhz']:.0f} MHz"
            for side in ("ours", "opponent")
        )
    return (
        f"{row['kernel']:9s} {row['case']:44s} {row['ours_s'] * 1e6:8.1f} us {rate} "
        f"{row['share_of_bound']:4.0%} of bound, {row['speedup']:.3f}x {row['opponent']} "
        f"({row['opponent_s'] * 1e6:.1f} us){wall}"
    )


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
