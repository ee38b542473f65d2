"""The cases of bench_roofline.py: compiled side by side, measured in turn."""

import argparse
import logging
import multiprocessing
import os
import threading
import time
import traceback
from pathlib import Path

COMMAND = "python scripts/bench_roofline.py --out profiles/nvidia_h200"
# Model, layers (None: all), phase, rows, tokens.
CASES = [
    ("bert-base", None, "forward", 96, 384),
    *(("llama3-8b", 2, "prefill", rows, 1024) for rows in (1, 4, 8, 16)),
    *(("llama3-8b", 2, "prefill", 4, tokens) for tokens in (256, 4096)),
    *(("llama3-8b", 2, "decode", rows, 1024) for rows in (1, 8, 32, 128, 256, 512)),
    *(("llama3-8b", 2, "decode", 4, tokens) for tokens in (256, 1024, 4096)),
    ("vit-base", 4, "forward", 256, None),
    ("conformer-l", 4, "forward", 32, 512),
    ("gpt2-xl", 4, "prefill", 16, 512),
    ("bloom-7b1", 2, "prefill", 8, 512),
]
TINY = [
    ("minilm", 2, "forward", 4, 16),
    ("gpt2", 1, "prefill", 2, 16),
    ("gpt2", 1, "decode", 2, 16),
]


class Turn:
    """Waits until all cases are compiled, then lets one measure at a time; a context manager."""

    def __init__(self, ready, lock, first, total: int, deadline: float):
        """Shares a counter, a lock and an event with all others; the ceilings set the event."""
        self.ready, self.lock, self.first = ready, lock, first
        self.total, self.deadline = total, deadline
        self.crowded = False

    def own(self) -> "Turn":
        """Another case's turn, of the same counter, lock and event."""
        return Turn(self.ready, self.lock, self.first, self.total, self.deadline)

    def count(self) -> None:
        """Counts a case as compiled, or as one that never will be."""
        with self.ready.get_lock():
            self.ready.value += 1

    def wait(self) -> None:
        """Waits for the others to be compiled, no longer than to the deadline."""
        self.count()
        while self.ready.value < self.total and time.time() < self.deadline:
            time.sleep(0.02)
        self.crowded = self.ready.value < self.total

    def __enter__(self) -> "Turn":
        """Waits, for the ceilings too."""
        self.wait()
        self.first.wait(60)
        self.lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        """Lets the next case measure."""
        self.lock.release()


class First(Turn):
    """The turn of the ceilings, before all others."""

    def __enter__(self) -> "Turn":
        """Waits for the others to be compiled alone."""
        self.wait()
        return self

    def __exit__(self, *error: object) -> None:
        """Lets the others measure."""
        self.first.set()


def measure_case(case, turn: Turn, results) -> None:
    """Traces, compiles and measures one case, and hands on what it found."""
    from models.presets import find_shape
    from pbjax.roofline.measured_table import Row
    from pbjax.roofline.report import roofline_report

    name, layers, phase, rows, tokens = case
    turn = turn.own()
    try:
        shape = find_shape(name, "bfloat16", layers).filled()
        call = shape.call(phase, rows, tokens)
        title = name if layers is None else f"{name}, {layers} layers"
        report = roofline_report(
            call.function,
            *shape.values(call),
            device=this_kind(),
            cache=call.cache,
            measure=True,
            turn=turn,
            name=title,
            phase=phase,
            items=rows,
            tokens=call.tokens,
            cached=call.cached,
        )
        row = Row(
            model=title,
            phase=phase,
            items=rows,
            tokens=call.tokens,
            cached=call.cached,
            measured=report.measured,
        )
        if turn.crowded:
            raise RuntimeError("others still compiled; give more seconds by --ready-within")
        results.put((case, report, row))
    except Exception:
        turn.count()
        results.put((case, traceback.format_exc(), None))


def this_kind() -> str:
    """JAX's name of the device."""
    import jax

    return jax.devices()[0].device_kind


def measure_cases(cases, turn: Turn, results, log: Path | None) -> None:
    """A process: a thread for each of its cases."""
    if log is not None:
        logging.basicConfig(filename=log, format="%(threadName)s %(message)s")
        logging.getLogger("pbjax.roofline.measure").setLevel(logging.DEBUG)
    threads = [
        threading.Thread(target=measure_case, args=(case, turn, results), name=str(case))
        for case in cases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def calibrate(turn: Turn, results) -> None:
    """A process: the ceilings."""
    from pbjax.tuning.calibration import calibrate as run

    try:
        results.put(("ceilings", run(this_kind(), turn=turn), None))
    except Exception:
        turn.count()
        turn.first.set()
        results.put(("ceilings", traceback.format_exc(), None))


def run(args: argparse.Namespace) -> None:
    """Measures, prints each stage beside its prediction, writes two tables."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    start = time.time()
    cases = [
        case
        for case in (TINY if args.tiny else CASES)
        if not args.only or {case[0], f"{case[0]} {case[2]}"} & set(args.only)
    ]
    context = multiprocessing.get_context("spawn")
    results, total = context.Queue(), len(cases) + (not args.no_ceilings)
    first = context.Event()
    shared = context.Value("i", 0), context.Lock(), first, total, start + args.ready_within
    turn = Turn(*shared)
    args.out.mkdir(parents=True, exist_ok=True)
    processes = [
        context.Process(
            target=measure_cases,
            args=(cases[i :: args.workers], turn, results, args.out / f"kernels{i}.log"),
        )
        for i in range(min(args.workers, len(cases)))
    ]
    if args.no_ceilings:
        first.set()
    else:
        processes.append(context.Process(target=calibrate, args=(First(*shared), results)))
    for process in processes:
        process.start()
    finish(results, total, args.out, start)
    for process in processes:
        process.join()
    print(f"{total} cases, {time.time() - start:.0f} s")


def finish(results, total: int, out: Path, start: float) -> None:
    """Prints and writes what the processes find, as they find it."""
    rows = []
    for _ in range(total):
        case, found, row = results.get()
        print(f"[{time.time() - start:.0f} s]", end=" ")
        if isinstance(found, str):
            print(f"FAILED {case}: {found}", flush=True)
        elif row is None:
            found.save(out / "ceilings.json")
            print(found, flush=True)
        else:
            from pbjax.roofline.measured_table import checks_text

            print(checks_text(found), flush=True)
            rows.append(row)
            write_table(rows, out / "roofline_stages.json")


def write_table(rows, path: Path) -> None:
    """Writes the rows in their order."""
    from pbjax.roofline.measured_table import MeasuredTable
    from pbjax.runtime.provenance import provenance_here

    rows.sort(key=lambda row: (row.model, row.phase, row.items, row.tokens, row.cached))
    MeasuredTable(provenance=provenance_here(this_kind(), COMMAND), rows=tuple(rows)).save(path)
