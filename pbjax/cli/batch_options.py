"""The batch of `pbjax optimize`, its split and its plan, as far as arguments decide them."""

from pathlib import Path

from pbjax.errors import InputError
from pbjax.planning.plan import Plan
from pbjax.planning.timetable import Split

AUTO = "auto"


def read_batch(text: str | None, latency_ms: float | None) -> int | None:
    """The number of rows that `--batch` names; None for "auto" and where it is absent.

    Raises:
      InputError: It is neither, the limit is no time, or there is one for a batch that is given.
    """
    if latency_ms is not None and not latency_ms > 0:
        raise InputError(
            f"--latency-ms {latency_ms:g}: not a time; milliseconds above 0 are allowed; give the "
            "longest that a batch may take, or leave it out"
        )
    if text == AUTO:
        return None
    if text is not None and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise InputError(
            f"--batch {text}: not a number of rows; 1 or more, or auto, is allowed; write for "
            "instance --batch 96"
        )
    if latency_ms is not None and text is not None:
        raise InputError(
            f"--latency-ms {latency_ms:g} --batch {text}: the batch is given already; a limit goes "
            "with --batch auto; leave out one of them"
        )
    if latency_ms is not None:
        raise InputError(
            f"--latency-ms {latency_ms:g}: no batch is chosen; a limit goes with --batch auto; add "
            "--batch auto, or leave out the limit"
        )
    return None if text is None else int(text)


def read_sizes(split: str | None, batch: str | None, rows: int | None) -> tuple[int, ...] | None:
    """The sizes of sub-batches that add up to the rows, where these are known already."""
    if split is None:
        return None
    if batch == AUTO:
        raise InputError(
            f"--split {split} --batch auto: sizes decide the batch; one of them is allowed; leave "
            "out the other"
        )
    try:
        sizes = tuple(int(size) for size in split.split(","))
    except ValueError as error:
        raise InputError(
            f"--split {split}: not numbers; one to three sizes joined by commas are allowed; "
            "write for instance --split 48,32,16"
        ) from error
    total = Split(sizes=sizes).batch_size
    if rows is not None and total != rows:
        raise InputError(
            f"--split {split}: adds up to {total}; the batch has {rows} rows; give sizes that "
            "add up to them, or leave out --split to search"
        )
    return sizes


def read_plan(
    path: Path | None, *, split: str | None, batch: str | None, rows: int | None
) -> Plan | None:
    """The plan to run, which decides the batch and its split."""
    if path is None:
        return None
    if split is not None:
        raise InputError(
            f"--plan {path} --split {split}: both say what to run; one of them is allowed; leave "
            "out the other"
        )
    plan = Plan.load(path)
    if batch == AUTO or (rows is not None and rows != plan.batch_size):
        raise InputError(
            f"--plan {path} --batch {batch}: the plan is for {plan.batch_size} rows; that batch is "
            "allowed; leave out --batch, or --plan to search again"
        )
    return plan
