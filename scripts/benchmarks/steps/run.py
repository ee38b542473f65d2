"""The course of bench_step.py: a process a case, its turn, and the table."""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

# Batch x context, and sizes of the sub-batches where the search is not to choose them.
CASES = ["1024x512", "768x512", "768x512:384+384", "512x1024:256+256", "256x2048:128+128"]
TINY_CASES = ["32x16", "24x32:12+12"]
COLUMNS = (
    *("batch", "context", "sizes", "unsplit", "sequential", "interleaved", "ratio", "bound"),
    *("overlap", "tokens/s"),
)


def run(args: argparse.Namespace) -> None:
    """Runs the cases."""
    cases = args.cases or (TINY_CASES if args.tiny else CASES)
    command = " ".join(["python", *sys.argv])
    rows = []
    for provenance, row, report in measured(cases, args.layers, command, tiny=args.tiny):
        print(report, flush=True)
        rows.append(row)
        result = {"schema_version": 2, "provenance": provenance, "rows": rows}
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{table(rows, args.layers)}")


def measured(
    cases: Sequence[str], num_layers: int, command: str, *, tiny: bool
) -> Iterator[tuple[dict, dict, str]]:
    """Yields provenance, row and report of each case, in the order in which they are measured.

    Raises:
      SystemExit: A process failed, or died.
    """
    # Several processes share the memory of the device.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    workers = [Worker.start(case, cases, num_layers, command, tiny) for case in cases]
    try:
        for worker in workers:
            worker.answer()  # It has compiled.
        for worker in workers:
            worker.end.send("measure")
            yield worker.answer()
            worker.process.join()  # Only then is its memory free.
    finally:
        for worker in workers:
            worker.process.terminate()


@dataclass(frozen=True, slots=True)
class Worker:
    """The process of a case, and the end of the pipe to it."""

    case: str
    process: BaseProcess
    end: Connection

    @classmethod
    def start(cls, case: str, cases: Sequence[str], num_layers: int, command: str, tiny: bool):
        """Starts a case, which compiles, says so, and waits for its turn."""
        context = multiprocessing.get_context("spawn")
        end, theirs = context.Pipe()
        process = context.Process(
            target=measure, args=(case, cases, num_layers, command, tiny, theirs), daemon=True
        )
        process.start()
        theirs.close()  # Else its death would not end what is read here.
        return cls(case, process, end)

    def answer(self) -> tuple[dict, dict, str] | None:
        """What the process says next; None means that it has compiled.

        Raises:
          SystemExit: It failed, or died.
        """
        try:
            found = self.end.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            raise SystemExit(f"bench_step({self.case}): its process died with {code}") from None
        if isinstance(found, str):
            raise SystemExit(f"bench_step({self.case}): {found}")
        return found


def measure(
    case: str, cases: Sequence[str], num_layers: int, command: str, tiny: bool, end: Connection
) -> None:
    """A process: measures a case when all have compiled and it is its turn."""

    def wait() -> None:
        end.send(None)
        end.recv()

    try:
        # Only here: the parent starts processes sooner without JAX.
        from .case import run

        end.send(run(case, cases, num_layers, command, tiny=tiny, wait=wait))
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")
        raise


def table(rows: Sequence[dict], num_layers: int) -> str:
    """All rows as text."""
    from pbjax.text_tables import table_text

    title = f"{num_layers} layers; ms, ratios over unsplit; tokens/s are of the fastest for 32"
    return table_text(title, COLUMNS, map(cells, rows))


def cells(row: dict) -> tuple[object, ...]:
    """One row of the table; a dash for what was not tried."""
    unsplit, sequential, interleaved = (
        row["seconds"].get(name) for name in ("unsplit", "sequential", "interleaved")
    )
    ratio = unsplit / interleaved if interleaved else None
    return (
        row["batch"],
        row["context"],
        "+".join(map(str, row["sizes"])),
        _cell(unsplit, 1e3),
        _cell(sequential, 1e3),
        _cell(interleaved, 1e3),
        _cell(ratio),
        f"{unsplit / row['bound_s']['interleaved']:.2f}",
        f"{row['overlapped_fraction']:.0%}",
        row["tokens_per_s_at_32_layers"],
    )


def _cell(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{factor * value:.3f}"
