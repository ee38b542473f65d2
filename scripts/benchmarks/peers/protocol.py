"""The protocol of bench_peers.py's processes: arguments, READY and DONE, both scenarios.

A process compiles, says READY, waits for a line, measures, prints a line of JSON for each of its
modes, and at the end DONE. Every side gives `measure` a `Program` and is timed by the same loop.
"""

import argparse
import dataclasses
import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .rows import ROWS, Row
from .scenarios import (
    RULE_QUERIES,
    WallClock,
    percentile,
    poisson_arrivals,
    serve,
    simulated_rate,
    verified_rate,
)

NUM_INPUTS, GROUPS = 4, 5
BOUND_S = 0.5  # Seconds that the items of the offline scenario take at the bound, by default.
TRIED_BATCHES = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model as one side has compiled it, for batches of one size.

    Attributes:
      call: call(inputs) starts a batch and returns its result, ready or not.
      inputs: Random inputs on the device, NUM_INPUTS of them.
      upload: upload(index) copies one of them from the host's memory to the device again.
      wait: wait(result) returns when the result is there.
      first_rows: first_rows(result) is the last hidden state of the first items, in f32.
    """

    call: Callable[[object], object]
    inputs: list
    upload: Callable[[int], object]
    wait: Callable[[object], None]
    first_rows: Callable[[object], np.ndarray]


def make_parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser of what bench_peers.py tells every process."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--row", required=True, choices=list(ROWS))
    parser.add_argument("--tiny", action="store_true", help="a small model, to try without a GPU")
    parser.add_argument("--outputs", type=Path, required=True, help="folder for the first output")
    parser.add_argument("--deadline", type=float, help="time.time() at which compiling ends")
    add_scenario(parser)
    return parser


def add_scenario(parser: argparse.ArgumentParser) -> None:
    """Adds the options of both scenarios."""
    parser.add_argument(
        "--items", type=int, help="of the offline scenario; by default half a second's"
    )
    parser.add_argument("--scenario", choices=["offline", "server"], default="offline")
    parser.add_argument("--latency-ms", type=float, help="limit of the 99th percentile")
    parser.add_argument("--rate", type=float, help="serve at this rate instead of searching one")
    parser.add_argument(
        "--queries", type=int, default=10_000, help="of a run of the server scenario"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")


def check_scenario(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends with what is wrong about the options of the scenarios, if anything is."""
    server = args.scenario == "server"
    if server and args.latency_ms is None:
        parser.error("--scenario server: no limit of the latency; give one by --latency-ms")
    if not server and (args.latency_ms is not None or args.rate is not None):
        parser.error("--latency-ms, --rate: --scenario is offline; they are for --scenario server")
    for name in ("items", "latency_ms", "rate", "queries"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            option = name.replace("_", "-")
            parser.error(f"--{option} {value:g}: it must be positive; give another")


def start_deadline(deadline: float | None) -> None:
    """Raises TimeoutError in the main thread at that time.time(), unless it is the turn before.

    A process that compiles several modes so keeps those that were done in time.
    """

    def stop(signal_number, frame):
        raise TimeoutError("not compiled within the seconds of --ready-within")

    if deadline is not None:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(deadline - time.time(), 1e-3))


def wait_for_turn() -> None:
    """Tells that all is compiled, and waits until the GPU is free."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("READY", flush=True)
    sys.stdin.readline()


def report(side: str, mode: str, **found: object) -> None:
    """Prints one line of JSON."""
    print(json.dumps({"side": side, "mode": mode, **found}), flush=True)


@contextmanager
def attempt(side: str, mode: str, deadline: float | None) -> Generator[None]:
    """Makes a mode ready in time; one that fails is reported, not hidden, and ends alone.

    Args:
      side: The `side` of the line.
      mode: The `mode` of the line.
      deadline: The time.time() after which it fails; None for no limit.
    """
    try:
        start_deadline(deadline)
        yield
    except Exception as error:
        report(side, mode, error=error_text(error))


def error_text(error: BaseException) -> str:
    """The name and the text of an error, cut to a length that a table can hold."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A mode that is compiled and waits for its turn.

    Attributes:
      mode: Its name in its line.
      program: The program that is timed.
      compile_s: Seconds that compiling took.
      dtype: The dtype that it computes in.
      more: Further entries of its line, found after it was timed.
    """

    mode: str
    program: Program
    compile_s: float
    dtype: str = "bfloat16"
    more: Callable[[], dict[str, object]] = dict


def finish(side: str, ready: Sequence[Ready], row: Row, args: argparse.Namespace) -> None:
    """Waits for the turn, times one mode after the other and prints its line, or what it raised.

    Args:
      side: The `side` of the lines, and of the names of the files of first outputs.
      ready: The modes; those that failed before have been reported.
      row: The model and batch that they compute.
      args: The options of `make_parser`.
    """
    wait_for_turn()
    for each in ready:
        try:
            path = args.outputs / f"{side} {row.name} {each.mode}.npy"
            found = measure(each.program, row, args, path) | each.more()
            report(side, each.mode, compile_s=each.compile_s, dtype=each.dtype, **found)
        except Exception as error:  # A mode that fails is reported, not hidden.
            report(side, each.mode, error=error_text(error))
    print("DONE", flush=True)


def measure(program: Program, row: Row, args: argparse.Namespace, path: Path) -> dict:
    """Times a program by the scenario and saves its first output.

    Args:
      program: The program that is timed.
      row: The model and batch that it computes.
      args: The options of `add_scenario`.
      path: The .npy file of the output.

    Returns:
      What the table needs: seconds of a batch, spread, calls, and the server scenario's results.
    """
    found = offline(program, num_calls(row, args))
    if args.scenario == "server":
        found["server"] = server(program, row, args)
    np.save(path, program.first_rows(program.call(program.inputs[0])))
    return found


def num_calls(row: Row, args: argparse.Namespace) -> int:
    """Calls of a group: the items, spread over the groups, in whole batches."""
    per_group = GROUPS * row.batch_size
    items = args.items or (2 * per_group if args.tiny else BOUND_S * row.batch_size / row.bound_s)
    return max(1, -int(-items // per_group))


def offline(program: Program, calls: int) -> dict:
    """Wall seconds of back-to-back calls on inputs in turn: the median of the groups."""

    def group() -> float:
        start = time.perf_counter()
        for index in range(calls):
            result = program.call(program.inputs[index % NUM_INPUTS])
        program.wait(result)
        return (time.perf_counter() - start) / calls

    group()  # Brings the clock to what it is under load.
    began = time.time()
    seconds = [group() for _ in range(GROUPS)]
    return {
        "seconds": statistics.median(seconds),
        "spread_s": max(seconds) - min(seconds),
        "calls": calls * GROUPS,
        "between": [began, time.time()],
    }


def server(program: Program, row: Row, args: argparse.Namespace) -> dict:
    """The highest rate within the limit, or what happens at the rate that was given.

    A query's input comes from the host's memory. The program has one shape, so that a batch that is
    not full costs as much as one that is.
    """
    clock, latency_s = WallClock(), 1e-3 * args.latency_ms
    samples = itertools.cycle(range(NUM_INPUTS))

    def run_batch(size: int) -> None:
        program.wait(program.call(program.upload(next(samples))))

    def probe(rate_per_s: float, seed: int):
        arrivals = poisson_arrivals(rate_per_s, args.queries, seed)
        return serve(arrivals, run_batch, row.batch_size, clock)

    tried = []
    for _ in range(TRIED_BATCHES):
        start = clock.now()
        run_batch(row.batch_size)
        tried.append(clock.now() - start)
    service_s = statistics.median(tried)
    common = {"latency_limit_s": latency_s, "service_s": service_s, "queries": args.queries}
    if args.rate is not None:
        served = probe(args.rate, args.seed)
        return common | {
            "rate_per_s": args.rate,
            "median_s": percentile(served.latencies_s, 0.5),
            "tail_s": served.tail_s,
            "mean_batch_size": served.mean_batch_size,
            "met": served.tail_s <= latency_s,
        }
    candidate = simulated_rate(lambda size: service_s, row.batch_size, latency_s, args.seed)
    rate, probes = verified_rate(probe, candidate, latency_s, args.seed + 1)
    return common | {
        "simulated_rate_per_s": candidate,
        "simulated_queries": RULE_QUERIES,
        "rate_per_s": rate,
        "met": rate > 0,
        "probes": [dataclasses.asdict(probe) for probe in probes],
    }
