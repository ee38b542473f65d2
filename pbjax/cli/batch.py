"""`--batch auto` of `pbjax optimize`: reads the option, and chooses the batch."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pbjax.cli.devices import this_device
from pbjax.errors import InputError

if TYPE_CHECKING:
    from pbjax.graph.functional import Model
    from pbjax.tuning.batch_size import BatchChoice

AUTO = "auto"


def read_batch(text: str, latency_ms: float | None) -> int | None:
    """The number of rows that `--batch` names, or None for "auto".

    Raises:
      InputError: It is neither, the limit is no time, or there is one for a batch that is given.
    """
    if latency_ms is not None and not latency_ms > 0:  # Before the model is loaded.
        raise InputError(
            f"--latency-ms {latency_ms:g}: not a time; milliseconds above 0 are allowed; give the "
            "longest that a batch may take, or leave it out"
        )
    if text == AUTO:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise InputError(
            f"--batch {text}: not a number of rows; 1 or more, or auto, is allowed; write for "
            "instance --batch 96"
        )
    if latency_ms is not None:
        raise InputError(
            f"--latency-ms {latency_ms:g} --batch {text}: the batch is given already; a limit goes "
            "with --batch auto; leave out one of them"
        )
    return int(text)


def choose_rows(
    model: "Model",
    inputs: tuple[object, ...],
    latency_ms: float | None,
    max_batch: int,
    progress: Callable[[str, int, int, str], None],
) -> "BatchChoice":
    """Chooses the batch of a model on this machine by prediction and a few measurements.

    Args:
      model: The model.
      inputs: Of a call, at any batch.
      latency_ms: The longest that a call may take; None = any.
      max_batch: How many rows there are.
      progress: Called as progress(phase, done, total, item).
    """
    from pbjax.planning.ceilings import calibrated
    from pbjax.tuning.batch_size import choose_batch

    return choose_batch(
        model,
        *inputs,
        device=calibrated(this_device("pbjax optimize --batch auto")),
        latency_s=None if latency_ms is None else latency_ms / 1e3,
        max_batch=max_batch,
        measure=True,
        progress=lambda done, total, item: progress("choose batch", done, total, item),
    )
