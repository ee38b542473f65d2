"""Our attention and norms beside tokamax's, for bench_peers.py: device time, outputs compared.

Shapes and inputs are those of kernel_cases. Every implementation that tokamax has for a GPU is
called by name, with the tiles that it chooses itself; cuDNN, which bench_kernels.py has, is left
out. Run by tokamax_process.py.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp
import tokamax

from pallas_kernels.attention.shapes import MODELS
from pallas_kernels.norm.shapes import SHAPES

from ..kernel_cases import Case, attention, norm
from .jax_process import NO_TRITON, kernels_of
from .protocol import GROUPS, error_text, wait_for_turn
from .rows import ROWS

ATTENTION, NORM = ("mosaic", "triton"), ("triton",)
EPS = 2.0**-7  # Of bfloat16.


def run(args: argparse.Namespace) -> None:
    """Compiles all cases of the rows, then times one after the other."""
    names = tuple(ROWS[name].title.lower() for name in args.rows)  # Cases begin with them.
    items = [item for item in [*attentions(), *norms()] if item[0].name.startswith(names)]
    pool = ThreadPoolExecutor()
    futures = [pool.submit(prepare, *item) for item in items]
    wait(futures, timeout=args.deadline and max(0.0, args.deadline - time.time()))
    late = [future.cancel() or not future.done() for future in futures]
    wait_for_turn()
    for (case, _), future, is_late in zip(items, futures, late, strict=True):
        line = {"side": "tokamax", "mode": case.name, "kernel": case.kernel, "case": case.name}
        if is_late:
            line["error"] = "not compiled within the seconds of --ready-within"
        elif error := future.exception():
            line["error"] = error_text(error)
        else:
            line |= compare(*future.result())
        print(json.dumps(line), flush=True)
    print("DONE", flush=True)


def attentions() -> Iterator[tuple[Case, dict[str, Callable]]]:
    """The models' attention as far as both sides have its terms: no ALiBi, no bias."""
    cases = {case.name: case for case in attention.cases() if case.dtype == "bfloat16"}
    for shape in MODELS:
        if shape.alibi or shape.bias_batch:
            continue

        def call(implementation: str, shape=shape):
            def run(q, k, v, *rest):
                rest = list(rest)
                return tokamax.dot_product_attention(
                    q,
                    k,
                    v,
                    is_causal=shape.causal,
                    key_value_seq_lengths=rest.pop(0) if shape.lengths else None,
                    bias=rest.pop(0)[:, None, None, :] if shape.key_bias else None,
                    implementation=implementation,
                )

            return run

        yield cases[shape.name], {name: call(name) for name in ATTENTION}


def norms() -> Iterator[tuple[Case, dict[str, Callable]]]:
    """The models' norms; tokamax's takes no residual, which XLA adds before it."""
    shapes = [shape for shape in SHAPES if not shape.name.startswith("large")]
    cases = {case.name: case for case in norm.cases() if case.dtype == "bfloat16"}
    for shape in shapes:

        def call(implementation: str, shape=shape):
            def run(x, *rest):
                rest = list(rest)
                total = x + rest.pop(0) if shape.residual else x
                scale, offset = rest[0], rest[1] if shape.bias else None
                normed = tokamax.layer_norm(
                    total,
                    scale,
                    offset,
                    epsilon=norm.EPS,
                    subtract_mean=shape.centred,
                    implementation=implementation,
                )
                return (normed, total) if shape.residual else normed

            return run

        yield cases[shape.name], {name: call(name) for name in NORM}


def prepare(case: Case, opponents: dict[str, Callable]):
    """Returns a case's compiled programs or refusals by name, their errors, and its inputs."""
    inputs = jax.jit(case.make)(jax.random.key(0))
    truth = jax.jit(case.reference)(*inputs)
    programs, errors = {}, {}
    for name, function in {"ours": case.run, **opponents}.items():
        try:
            program = jax.jit(function, compiler_options=NO_TRITON).lower(*inputs).compile()
            errors[name] = float(f"{relative_rms(program(*inputs), truth):.2g}")
            programs[name] = program
        except Exception as error:  # A kernel that refuses is reported, not hidden.
            programs[name] = error_text(error)
    return programs, errors, inputs


@jax.jit
def relative_rms(result, truth) -> jax.Array:
    """Root mean square of the difference over that of the truth, the largest of the results."""

    def one(actual, expected):
        expected = expected.astype(jnp.float32)
        error = actual.astype(jnp.float32) - expected
        return jnp.sqrt(jnp.mean(error**2) / jnp.mean(expected**2))

    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(truth), strict=True)
    return jnp.max(jnp.stack([one(actual, expected) for actual, expected in pairs]))


def compare(programs: dict, errors: dict, inputs: tuple) -> dict:
    """Device seconds of every program, which take turns; an error's text for what did not run."""
    if isinstance(programs["ours"], str):
        return {"error": f"ours: {programs['ours']}"}
    runs = {name: program for name, program in programs.items() if not isinstance(program, str)}
    times = {name: [] for name in runs}
    for _ in range(GROUPS):
        for name, program in runs.items():
            launches = kernels_of(lambda _, given, program=program: program(*given), None, inputs)
            times[name].append(sum(launch["seconds"] for launch in launches))
    found = programs | {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "ours_s": found.pop("ours"),
        "tokamax_s": found,
        "relative_rms": errors,
        "agree": all(error <= EPS for error in errors.values()),
    }
