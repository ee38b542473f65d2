"""The course of bench_peers.py: starts the processes of all rows, and lets them measure in turn."""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .processes import PROVIDERS, Absent, Meter, Worker, why_absent
from .protocol import GROUPS, NUM_INPUTS
from .results import describe, finish, kernel_table, table
from .rows import PEAK_FLOPS_PER_S, ROWS, get_row

TORCH = ("eager", "inductor", "max-autotune", "reduce-overhead")
ONNX = (*PROVIDERS, "tensorrt")
# Modes that share a process; those with CUDA graphs keep memory of their own.
TOGETHER = ("eager", "inductor")
GRACE_S = 5  # For a process that stops compiling by itself and keeps what it has.
PEERS = [*TORCH[:3], *ONNX[1:], "tokamax"]


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark, prints its tables, and writes it as JSON."""
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    start, about = time.time(), provenance(args)
    with tempfile.TemporaryDirectory() as folder:
        args.deadline = time.time() + args.ready_within
        absent = {m: why_absent(args.peer_python, m) for m in args.peers if m in ONNX}
        workers = {name: start_row(name, args, folder, absent) for name in args.rows}
        if "tokamax" in args.peers:
            command = [*process(sys.executable, "tokamax"), "--rows", *args.rows]
            command += ["--deadline", str(args.deadline)]
            workers["kernels"] = [Worker(command, "tokamax", ["tokamax"], 2)]
        try:
            for worker in (w for group in workers.values() for w in group):
                worker.wait_ready(args.deadline + GRACE_S)
                if isinstance(worker, Worker) and worker.ready:
                    text = f"{worker.side} {', '.join(worker.modes)}"
                    print(f"{worker.ready_at - start:4.0f} s: {text}", flush=True)
            for lines, kernels in measure(workers, args, Path(folder)):
                if args.out:  # After every row: what a run that is cut short had found stays.
                    document = {"schema_version": 1, "provenance": about, "rows": lines}
                    text = json.dumps(document | {"kernels": kernels}, indent=1)
                    args.out.write_text(text + "\n")
        finally:
            for worker in (w for group in workers.values() for w in group):
                worker.stop()
    print(table({name: ROWS[name] for name in args.rows}, lines))
    if kernels:
        print(kernel_table(kernels))
    print(f"{len(lines)} rows, {time.time() - start:.0f} s")


def measure(
    workers: dict[str, list[Worker | Absent]], args: argparse.Namespace, folder: Path
) -> Iterator[tuple[list[dict], list[dict]]]:
    """Lets the processes measure in turn.

    Yields:
      After each row, the lines of all rows so far, and those of tokamax.
    """
    lines, meter = [], Meter()
    kernels = [line for w in workers.pop("kernels", []) for line in turn(w)]
    for name, group in workers.items():
        row = get_row(name, tiny=args.tiny)
        found = finish(row, [line for worker in group for line in turn(worker)], folder)
        for line in found:
            line |= meter.between(*line.pop("between", (0, 0)))
            print(describe(row, line), flush=True)
        lines += found
        yield lines, kernels
    meter.stop()


def turn(worker: Worker | Absent) -> list[dict]:
    """Returns what a process measured, and ends it."""
    lines = worker.release()
    worker.stop()
    return lines


def start_row(
    name: str, args: argparse.Namespace, folder: str, absent: dict[str, str]
) -> list[Worker | Absent]:
    """Starts the processes of a row; `absent` says why an ONNX mode has none."""
    common = ["--row", name, "--outputs", folder, "--deadline", str(args.deadline)]
    common += scenario_options(name, args)
    workers: list[Worker | Absent] = []
    for part in range(min(args.split, len(args.variants))):
        variants = args.variants[part :: args.split]
        command = [*process(sys.executable, "jax"), *common]
        traced = [variant for variant in args.trace if variant in variants]
        command += ["--variants", *variants, "--trace", *traced]
        workers.append(Worker(command, "jax", variants, 2))
    torch = [*process(args.peer_python, "torch"), *common, "--modes"]
    if modes := [mode for mode in args.peers if mode in TOGETHER]:
        workers.append(Worker([*torch, *modes, "--truth"], "torch", modes, 2))
    for mode in args.peers:
        if mode in TORCH and mode not in TOGETHER:
            threads = 8 if mode == "max-autotune" else 2  # It compiles tens of templates a product.
            workers.append(Worker([*torch, mode], "torch", [mode], threads))
        if mode in ONNX:
            command = [*process(args.peer_python, "onnx"), *common, "--mode", mode]
            reason = absent[mode]
            found = Absent("onnx", mode, reason) if reason else Worker(command, "onnx", [mode], 2)
            workers.append(found)
    return workers


def process(python: str, side: str) -> list[str]:
    """The command that starts one of the processes beside this file."""
    return [python, "-m", f"{__package__}.{side}_process"]


def scenario_options(name: str, args: argparse.Namespace) -> list[str]:
    """The options of both scenarios for the processes of a row."""
    options = ["--tiny"] if args.tiny else []
    names = ["items", "queries", "seed"]
    if args.scenario == "server" and name in args.server_rows:
        names += ["scenario", "latency_ms", "rate"]
    for option in names:
        if (value := getattr(args, option)) is not None:
            options += ["--" + option.replace("_", "-"), str(value)]
    return options


def provenance(args: argparse.Namespace) -> dict:
    """The device, software and command of the measurement."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=name,driver_version,power.limit"]
    return {
        "device_driver_power_limit": _output([*query, "--format=csv,noheader"]),
        "versions": versions(sys.executable, ["jax", "flax"])
        | versions(args.peer_python, ["torch", "transformers", "triton", "onnxruntime", "tokamax"]),
        "precision": "bfloat16; TF32 for PyTorch's products in f32; ONNX as its rows say",
        "peak_flops_per_s": PEAK_FLOPS_PER_S,
        "seconds": f"median of {GROUPS} groups of back-to-back calls on {NUM_INPUTS} random inputs "
        "in turn, wall clock, after a group that is not counted",
        "commit": args.commit or _output(["git", "rev-parse", "--short", "HEAD"]),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def versions(python: str, names: list[str]) -> dict[str, str]:
    """Versions of packages as a Python has them; those that it lacks are left out."""
    code = f"""import json; from importlib import metadata as m
have = {{d.name.lower(): d.version for d in m.distributions()}}
print(json.dumps({{n: have[n] for n in {names!r} if n in have}}))"""
    return json.loads(_output([python, "-c", code]))


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[-1]
