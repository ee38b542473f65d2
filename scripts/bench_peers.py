#!/usr/bin/env python3
"""Times the six models at full size, ours and PyTorch's, in one run on one GPU.

Every row of model_rows.py has a process for ours (model_jax.py) and one or more for PyTorch
(peer_torch.py). All compile at the same time; once all are ready they measure one after the other,
a row's side by side. Weights, inputs and batches are the same, and outputs are compared.

    python scripts/bench_peers.py --out profiles/nvidia_h200/bench_models.json
    python scripts/bench_peers.py --tiny --peer-python OTHER_PYTHON    # a try without a GPU
"""

import argparse
import datetime
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from model_rows import PEAK_FLOPS_PER_S, ROWS, Row, get_row

HERE = Path(__file__).parent
# A rounding to bfloat16 is off by 2^-9 at most; about eight of them a layer reach the hidden state,
# and add up as their root.
ROUNDING, ROUNDINGS_PER_LAYER = 2.0**-8, 8


def main() -> None:
    """Runs the benchmark, prints one table, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--variants", nargs="+", default=["library", "with_kernels"])
    parser.add_argument("--trace", nargs="*", default=["with_kernels"])
    parser.add_argument("--peers", nargs="*", default=["eager", "inductor"], help="of PyTorch")
    parser.add_argument("--ready-within", type=int, default=300, help="seconds for compiling")
    parser.add_argument("--split", type=int, default=1, help="processes for the variants of a row")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        workers = {name: start_row(name, args, folder) for name in args.rows}
        deadline = time.time() + args.ready_within
        for worker in (w for row in workers.values() for w in row):
            worker.wait_ready(deadline)
        print(f"compiled after {time.time() - start:.0f} s", flush=True)
        rows = []
        for name, group in workers.items():
            row = get_row(name, tiny=args.tiny)
            lines = [line for worker in group for line in worker.release()]
            rows += finish(row, lines, Path(folder))
            for line in rows[-len(lines) :]:
                print(describe(row, line), flush=True)
    print(table(rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        document = {"schema_version": 1, "provenance": provenance(args), "rows": rows}
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(rows)} rows, {time.time() - start:.0f} s")


class Worker:
    """A process that compiles, says READY, and measures when told."""

    def __init__(self, command: list[str]):
        """Starts it."""
        env = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TORCHINDUCTOR_COMPILE_THREADS": "2",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "OMP_NUM_THREADS": "2",
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.name = " ".join(command[1:])
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.found: list[dict] = []
        self.ready = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put(None)

    def wait_ready(self, deadline: float) -> None:
        """Waits until it has compiled; ends it if that takes too long."""
        while not self.ready:
            try:
                line = self.lines.get(timeout=max(0.01, deadline - time.time()))
            except queue.Empty:
                print(f"TOO LATE {self.name}", flush=True)
                self.process.terminate()
                return
            if line is None:
                print(f"ENDED {self.name}", flush=True)
                return
            self._take(line)

    def release(self) -> list[dict]:
        """Lets it measure and returns all its lines."""
        if self.ready:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            while (line := self.lines.get()) not in (None, "DONE"):
                self._take(line)
        return self.found

    def _take(self, line: str) -> None:
        self.ready |= line == "READY"
        if line.startswith("{"):
            self.found.append(json.loads(line))


def start_row(name: str, args: argparse.Namespace, folder: str) -> list[Worker]:
    """Starts the processes of a row."""
    common = ["--outputs", folder, *(["--tiny"] if args.tiny else [])]
    workers = []
    for part in range(min(args.split, len(args.variants))):
        variants = args.variants[part :: args.split]
        command = [sys.executable, str(HERE / "model_jax.py"), "--row", name, *common]
        traced = [v for v in args.trace if v in variants]
        workers.append(Worker([*command, "--variants", *variants, "--trace", *traced]))
    # Modes with CUDA graphs keep memory of their own, so that they get a process.
    if modes := [m for m in args.peers if m in ("eager", "inductor")]:
        workers.append(Worker([*peer(name, modes, args, common), "--truth"]))
    for mode in (m for m in args.peers if m not in ("eager", "inductor")):
        workers.append(Worker(peer(name, [mode], args, common)))
    return workers


def peer(name: str, modes: list[str], args: argparse.Namespace, common: list[str]) -> list[str]:
    """The command that runs PyTorch's side of a row."""
    command = [args.peer_python, str(HERE / "peer_torch.py"), "--rows", name, "--wait", *common]
    return [*command, "--modes", *modes]


def finish(row: Row, lines: list[dict], folder: Path) -> list[dict]:
    """Adds rates, ratios and differences of outputs to what the processes of a row printed."""
    peers = [x["seconds"] for x in lines if x["side"] == "torch" and "seconds" in x]
    # Without PyTorch, ours are compared with the first of them.
    truths = [folder / f"torch {row.name} float32.npy"]
    truths += [folder / f"jax {row.name} {line['mode']}.npy" for line in lines]
    truth = next((path for path in truths if path.exists()), None)
    for line in lines:
        line |= {"row": row.name, "batch_size": row.batch_size, "length": row.length}
        if "seconds" not in line:
            continue
        line["items_per_s"] = round(row.batch_size / line["seconds"], 1)
        line["share_of_bound"] = round(row.bound_s / line["seconds"], 3)
        if peers:
            line["over_best_torch"] = round(min(peers) / line["seconds"], 3)
        if truth is not None:
            line |= difference(row, folder / f"{line['side']} {row.name} {line['mode']}.npy", truth)
    return lines


def difference(row: Row, path: Path, truth: Path) -> dict:
    """Root mean square of the difference over that of the values, and whether it is rounding."""
    actual, expected = np.load(path), np.load(truth)
    relative = float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))
    allowed = ROUNDING * (ROUNDINGS_PER_LAYER * row.num_layers) ** 0.5
    return {"relative_rms": float(f"{relative:.2g}"), "agrees": bool(relative <= allowed)}


def describe(row: Row, line: dict) -> str:
    """One line on the screen."""
    label = f"{row.title:12s} {line['side']:5s} {line['mode']:22s}"
    if "error" in line:
        return f"{label} FAILED {line['error']}"
    text = f"{label} {1e3 * line['seconds']:8.3f} ms {line['items_per_s']:9.1f} {row.unit}/s"
    text += f" {line['share_of_bound']:5.0%} of bound"
    if "over_best_torch" in line:
        text += f" {line['over_best_torch']:.2f}x torch"
    if "agrees" in line:
        text += f" rms {line['relative_rms']:.1e} {'ok' if line['agrees'] else 'DIFFERS'}"
    text += f" (compile {line['compile_s']} s)"
    for kernel in line.get("kernels", [])[:14]:
        us = 1e6 * kernel["seconds"]
        text += f"\n    {us:9.1f} us {kernel['launches']:4d} x {kernel['kernel']}"
    return text


def table(rows: list[dict]) -> str:
    """The best of each side, a row each."""
    lines = [f"{'':12s} {'ours':>10s} {'PyTorch':>10s}  ratio  of bound  ours is, PyTorch is"]
    for name in dict.fromkeys(row["row"] for row in rows):
        best = {}
        for side in ("jax", "torch"):
            timed = [r for r in rows if r["row"] == name and r["side"] == side and "seconds" in r]
            best[side] = min(timed, key=lambda r: r["seconds"], default=None)
        ours, theirs = best["jax"], best["torch"]
        if ours is None:
            continue
        text = f"{ROWS[name].title:12s} {ours['items_per_s']:10.1f}"
        text += f" {theirs['items_per_s']:10.1f}  {ours['over_best_torch']:5.2f}" if theirs else ""
        text += f"  {ours['share_of_bound']:8.0%}  {ours['mode']}"
        lines.append(text + (f", {theirs['mode']}" if theirs else ""))
    return "\n".join(lines)


def provenance(args: argparse.Namespace) -> dict:
    """Where and how it was measured."""
    versions = "import json, {0}; print(json.dumps([{1}]))"
    ours = versions.format(
        "jax, flax", "jax.__version__, flax.__version__, jax.devices()[0].device_kind"
    )
    theirs = versions.format("torch, transformers", "torch.__version__, transformers.__version__")
    jax_version, flax_version, kind = json.loads(_output([sys.executable, "-c", ours]))
    torch_version, hf_version = json.loads(_output([args.peer_python, "-c", theirs]))
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    return {
        "device_kind": kind,
        "driver_and_power_limit": "" if args.tiny else _output(query),
        "jax": jax_version,
        "flax": flax_version,
        "torch": torch_version,
        "transformers": hf_version,
        "dtype": "bfloat16",
        "peak_flops_per_s": PEAK_FLOPS_PER_S,
        "seconds": "median of 5 groups of back-to-back calls on 4 random inputs, wall clock",
        "commit": args.commit or _output(["git", "rev-parse", "--short", "HEAD"]),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.strip().splitlines() or ["unknown"])[-1]


if __name__ == "__main__":
    main()
