"""What stress_programs.py calls: a decode step and forward passes, compared bit for bit."""

import argparse
import os
import time
from dataclasses import dataclass, replace
from functools import partial

from . import pool

LAYERS = (6, 1)  # Layers of a step, and of a step with --tiny.
STEPS = ("unsplit 768x512", "interleaved 768x512:384+384")
MODELS = ("vit-base", "bert-base", "conformer-l", "gpt2-xl", "bloom-7b1", "llama3-8b")
TINY_STEPS = ("unsplit 24x16", "interleaved 24x16:8+16")
TINY_MODELS = ("bert-base",)
# Processes may differ by this share of the largest value: XLA chooses products by timing them in
# each, and another one rounds differently.
ROUNDING = 0.05
FILLING_BYTES, SLACK_BYTES = 1 << 30, 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The work of one process.

    Attributes:
      program: One of STEPS or MODELS.
      calls: The number of calls, the first included.
      full: Whether the device's memory is filled before.
      tiny: Whether sizes are for a try without a GPU.
    """

    program: str
    calls: int
    full: bool
    tiny: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The findings of one process.

    Attributes:
      problem: What is wrong; empty if nothing is.
      inputs: Digest of each array that went in, and of each copy that the first call used up.
      first: Values of the first result of the first call, in f32.
      seconds: Seconds of a call, comparing included.
    """

    problem: str
    inputs: tuple[int, ...]
    first: object
    seconds: float


def run(args: argparse.Namespace) -> int:
    """Runs the rounds; returns the exit code."""
    if not args.tiny:
        pool.require_gpu()
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.95"  # Of all: what fills it is ours too.
    programs = args.programs or program_names(tiny=args.tiny)
    found: dict[str, list[Outcome]] = {program: [] for program in programs}
    start, failed = time.time(), 0
    for number in range(args.rounds):
        full = bool(number % 2) and not (args.tiny or args.together)
        items = [
            Item(program=program, calls=args.calls, full=full, tiny=args.tiny)
            for program in programs
            for _ in range(args.copies)
        ]
        alone = not args.together
        for item, result in pool.run(prepare, measure, items, len(items), quiet=True, alone=alone):
            text = result if isinstance(result, str) else result.problem
            if not isinstance(result, str):
                text = text or against(found[item.program], result)
                found[item.program].append(result)
            failed += bool(text)
            verdict = f"FAILED {text}" if text else f"same, {1e3 * result.seconds:.2f} ms a call"
            memory = "full" if full else "free"
            print(f"{item.program:24s} round {number}, memory {memory}: {verdict}", flush=True)
    total = args.rounds * args.copies * len(programs)
    print(f"{total - failed} same, {failed} failed, {time.time() - start:.0f} s")
    return 1 if failed else 0


def program_names(*, tiny: bool) -> tuple[str, ...]:
    """The programs that can be asked for."""
    return (*TINY_STEPS, *TINY_MODELS) if tiny else (*STEPS, *MODELS)


def prepare(item: Item):
    """Compiles a program.

    Returns:
      What goes in, and its digests; what begins, and returns copies that the first call uses up and
      a call without arguments; the bytes that it needs beside what goes in.
    """
    import numpy as np

    from .repeats import digests

    inputs, begin, room_bytes = step_call(item) if " " in item.program else model_call(item)
    return inputs, np.asarray(digests(inputs)), begin, room_bytes


def measure(item: Item, ready) -> Outcome:
    """Calls the program, and compares; `ready` is what `prepare` returned."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from .repeats import add_call, describe, digests, none_differ

    inputs, before, begin, room_bytes = ready
    filling = fill(room_bytes) if item.full else []
    copies, call = begin()
    copied = digests(copies) if copies else ()
    # No waiting: what compares is compiled while the first call runs, as a user's next lines are.
    first = call()
    del copies
    tally = none_differ(first)
    start = time.perf_counter()
    for _ in range(1, item.calls):
        tally = add_call(tally, first, call())
    problem = describe(jax.block_until_ready(tally))
    seconds = (time.perf_counter() - start) / (item.calls - 1)
    if (moved := int(np.sum(before != np.asarray(digests(inputs))))) and not problem:
        problem = f"{moved} of {len(before)} inputs are not what they were when they were made"
    del filling
    return Outcome(
        problem=problem,
        inputs=tuple(map(int, (*before, *np.asarray(copied)))),
        first=np.asarray(first[0].astype(jnp.float32)),
        seconds=seconds,
    )


def against(earlier: list[Outcome], latest: Outcome) -> str:
    """What differs from the first process; empty if inputs are equal and results are close."""
    import numpy as np

    if not earlier:
        return ""
    other = earlier[0]
    pairs = zip(other.inputs, latest.inputs, strict=True)
    if differing := [i for i, (a, b) in enumerate(pairs) if a != b]:
        return f"inputs {differing} of {len(latest.inputs)} are not those of the first process"
    difference = np.abs(latest.first - other.first)
    bound = ROUNDING * float(np.max(np.abs(other.first)))
    outside = ~(difference <= bound)  # NaN is outside.
    if not outside.any():
        return ""
    from .repeats import ranges_of

    return (
        f"{outside.sum():,d} elements of the first call differ from the first process's by more "
        f"than {bound:.3g}, at {ranges_of(outside)}"
    )


def step_call(item: Item):
    """A decode step whose state is donated, at the same lengths in every call."""
    import jax
    from flax import nnx

    from pbjax.decode.programs import StepWorkload
    from pbjax.device import find_device
    from pbjax.program.analysis import analyse
    from pbjax.runtime.compilation import ProgramSpec
    from pbjax.tuning.request import Request

    from .repeats import digests
    from .steps import case as step_case

    name, case = item.program.split()
    batch_size, context, sizes = step_case.parsed(case)
    graph, shapes = nnx.split(
        nnx.eval_shape(lambda: step_case.make(LAYERS[item.tiny], tiny=item.tiny))
    )
    model, given = step_case.example(graph, shapes, batch_size, context)
    device = find_device(jax.devices()[0].device_kind, num_cores=os.cpu_count() or 1)
    analysis = analyse(model.decode, given, device=device)
    workload = StepWorkload.of(Request.of(model.decode, given, state=1), analysis)
    interleaved = name == "interleaved"
    sizes = sizes if interleaved else (batch_size,)
    spec = ProgramSpec(sizes=sizes, staggers=(0,) * len(sizes), interleaved=interleaved)
    lowered = workload.lower(spec)
    step = lowered.finish(*lowered.compile())

    def begin():
        pieces = workload.start(step)

        def call():
            nonlocal pieces
            outputs, pieces = workload.call(step, pieces)
            return [*outputs, digests(jax.tree.leaves(pieces))]

        return jax.tree.leaves(pieces), call

    held = [*analysis.weights, *workload.leaves]
    return held, begin, workload.state_bytes + step.temporary_bytes


def model_call(item: Item):
    """A model's forward pass, at the sizes of the README."""
    import jax

    from models.presets import find_shape
    from pbjax.graph.functional import functional
    from pbjax.tuning.preset_model import ForwardPass

    from .model_tables import BATCHES

    asked = ForwardPass(model=item.program, batch_size=BATCHES[item.program])
    if item.tiny:
        asked = replace(asked, batch_size=2, seq_len=8)
    shape = find_shape(asked.model, asked.dtype, 1 if item.tiny else None)
    shape = shape.without_head().filled()
    call = shape.call("forward", asked.batch_size, asked.length)
    model, given = functional(call.function), shape.values(call)
    weights, tree = jax.tree.flatten(model.params)

    def program(weights, *inputs):
        return jax.tree.leaves(model.apply(jax.tree.unflatten(tree, weights), *inputs))

    compiled = jax.jit(program).lower(weights, *given).compile()
    memory = compiled.memory_analysis()
    # Results: the first, those under way, and where they differ.
    room = memory.temp_size_in_bytes + 6 * memory.output_size_in_bytes if memory else 0
    again = partial(compiled, weights, *given)
    return [*weights, *jax.tree.leaves(given)], lambda: ([], again), room


def fill(room_bytes: int) -> list:
    """Arrays that take the device's free memory but for a program's."""
    import jax.numpy as jnp

    # The slack is for libraries, programs, and what an allocator cannot use.
    blocks = max(0, free_bytes() - room_bytes - SLACK_BYTES) // FILLING_BYTES
    return [jnp.zeros(FILLING_BYTES, jnp.uint8).block_until_ready() for _ in range(blocks)]


def free_bytes() -> int:
    """The free memory of the device; what our process has set aside does not count as free."""
    import subprocess

    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(found.stdout) << 20
