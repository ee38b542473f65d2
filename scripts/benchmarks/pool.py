"""Worker processes that compile at the same time and use the GPU one after the other."""

import faulthandler
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from queue import Empty
from typing import Any


def require_gpu() -> None:
    """Ends the script where there is no NVIDIA GPU; jax would say so once for every case.

    Asks no library: a process that has opened the GPU disturbs those that measure.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not Path("/dev/nvidiactl").exists():
        raise SystemExit(
            "no NVIDIA GPU here, or JAX_PLATFORMS=cpu; kernels need a Hopper GPU (sm_90a); run "
            "this where one is"
        )


def run(
    prepare: Callable[[Any], Any],
    measure: Callable[[Any, Any], Any],
    items: list[Any],
    workers: int,
    *,
    quiet: bool,
    prepare_within_s: float | None = None,
    alone: bool = True,
) -> Iterator[tuple[Any, Any]]:
    """Yields (item, result) as they come; a result is an exception's text where one was raised.

    Args:
      prepare: Compiles an item, in a worker process; a function of a module, as `measure` is.
      measure: Runs what prepare returned, alone on the GPU; its result must pickle.
      items: Picklable.
      workers: Number of processes.
      quiet: Prepare every item before the first is measured, so that nothing compiles or autotunes
        beside a measurement. Without it an item is measured as soon as it is ready.
      prepare_within_s: A quiet worker that takes longer prints where its threads are, and ends: its
        items have a line of text as their results, and the others go on. None waits for ever.
      alone: Whether workers take turns to measure; without it they share the GPU, which switches
        between them.

    Yields:
      Each item with its result.

    Raises:
      SystemExit: A worker died while others measured, or might have.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    context = multiprocessing.get_context("spawn")
    workers = min(workers, len(items))
    shares = [items[i::workers] for i in range(workers)]
    go = context.Event() if quiet else None
    lock, queue = context.Lock() if alone else nullcontext(), context.Queue()
    processes = [
        context.Process(
            target=_work, args=(prepare, measure, i, share, go, lock, queue, prepare_within_s)
        )
        for i, share in enumerate(shares)
    ]
    for process in processes:
        process.start()
    left, preparing, lost = len(items), set(range(workers if quiet else 0)), set()
    while left:
        if go is not None and not preparing:
            go.set()
        try:
            found = queue.get(timeout=5)
        except Empty:
            # A worker that has done its share ends with 0 while the others still compile.
            dead = {i for i, process in enumerate(processes) if process.exitcode} - lost
            if dead - preparing:
                for process in processes:
                    process.terminate()
                raise SystemExit("a worker process died; its output is above") from None
            preparing, lost = preparing - dead, lost | dead
            for item in (item for i in dead for item in shares[i]):
                left -= 1
                yield item, "its process ended before it was ready; its output is above"
            continue
        if isinstance(found, int):
            preparing.discard(found)
            continue
        left -= 1
        yield found
    for process in processes:
        process.join()


def _work(prepare, measure, index, items, go, lock, queue, prepare_within_s) -> None:
    prepared = ((item, _attempt(prepare, item)) for item in items)
    if go is not None:
        if prepare_within_s is not None:
            faulthandler.dump_traceback_later(prepare_within_s, exit=True)
        prepared = list(prepared)
        faulthandler.cancel_dump_traceback_later()
        queue.put(index)
        go.wait()
    for item, ready in prepared:
        if isinstance(ready, str):
            queue.put((item, ready))
            continue
        with lock:
            result = _attempt(measure, item, ready)
        queue.put((item, result))
    queue.close()
    queue.join_thread()


def _attempt(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
