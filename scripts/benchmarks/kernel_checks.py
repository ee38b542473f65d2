"""The checks of check_kernels.py: repeats compared bit for bit, the first with a reference."""

import argparse
import functools
import time

from . import pool
from .kernel_cases import load_cases

BURST = 4  # Runs queued back to back between two fills of memory.
CANARY_BYTES, CANARIES, CANARY = 1 << 20, 32, 0x5A
# The truth need not be fast: searching the fastest products of f32 takes minutes.
REFERENCE_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def run(args: argparse.Namespace) -> int:
    """Runs the checks; returns the exit code."""
    pool.require_gpu()
    start, cases = time.time(), load_cases(tuple(args.kernels), args.pattern)
    prepare = functools.partial(_prepare, tuple(args.kernels), args.pattern, args.seed)
    measure = functools.partial(_check, args.repeats)
    failed = 0
    print(f"{len(cases)} cases, seed {args.seed}")
    for index, (worst, problem) in (
        (i, result if isinstance(result, tuple) else (float("nan"), result))
        for i, result in pool.run(
            prepare,
            measure,
            list(range(len(cases))),
            args.workers,
            quiet=False,
            alone=not args.together,
        )
    ):
        case = cases[index]
        failed += bool(problem)
        verdict = (
            f"FAILED {problem}" if problem else f"right, worst at {worst:4.0%} of the tolerance"
        )
        print(f"{case.kernel:16s} {case.name:48s} {case.dtype:9s} {verdict}", flush=True)
    print(f"{len(cases) - failed} right, {failed} failed, {time.time() - start:.0f} s")
    return 1 if failed else 0


def _prepare(kernels, pattern, seed, index):
    """Compiles all that a check runs: only one worker measures at a time, and may not compile."""
    import jax
    import jax.numpy as jnp

    from .repeats import add_call, none_differ

    case = load_cases(kernels, pattern)[index]
    key = jax.random.fold_in(jax.random.key(seed), index)
    shapes = jax.eval_shape(case.make, key)
    results = jax.tree.leaves(jax.eval_shape(case.run, *shapes))
    expected = jax.tree.leaves(jax.eval_shape(case.reference, *shapes))
    bounds = [jax.ShapeDtypeStruct((), jnp.float32)] * len(results)
    tally = none_differ(results)

    def poison():
        return [jnp.full(x.shape, jnp.nan, case.dtype) for x in expected]

    reference = jax.jit(case.reference, compiler_options=REFERENCE_OPTIONS)
    return (
        case,
        functools.partial(jax.jit(case.make).lower(key).compile(), key),
        jax.jit(case.run).lower(*shapes).compile(),
        reference.lower(*shapes).compile(),
        jax.jit(poison).lower().compile(),
        tally,
        add_call.lower(tally, results, results).compile(),
        jax.jit(_magnitudes).lower(expected).compile(),
        jax.jit(_shares).lower(results, expected, bounds, bounds).compile(),
    )


def _check(repeats, _, prepared):
    """Returns the worst share of the tolerance, and what is wrong, if anything is."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.testing import tolerance

    from .repeats import describe

    case, make, run, reference, poison, tally, add, magnitudes_of, shares = prepared
    inputs = make()
    expected = jax.tree.leaves(reference(*inputs))
    canaries = [jnp.full((CANARY_BYTES,), CANARY, jnp.uint8) for _ in range(CANARIES)]
    first, tally = repeated(functools.partial(run, *inputs), poison, tally, add, repeats)
    if not all(np.all(np.asarray(canary) == CANARY) for canary in canaries):
        return float("nan"), "a canary was overwritten"
    if problem := describe(tally):
        return float("nan"), problem
    magnitudes = magnitudes_of(expected)
    bounds = [
        tolerance(x.dtype, magnitude=float(magnitude), **close)
        for x, magnitude, close in zip(first, magnitudes, case.close, strict=True)
    ]
    absolute = [np.float32(bound.absolute) for bound in bounds]
    relative = [np.float32(bound.relative) for bound in bounds]
    worst = max(map(float, shares(first, expected, absolute, relative)))
    return worst, "" if worst <= 1 else f"error is {worst:.3g} times the tolerance"


def repeated(run, poison, tally, add, repeats):
    """The results of the first run, and the tally of the others, compared with them."""
    import jax

    jax.block_until_ready(poison())
    first = jax.block_until_ready(jax.tree.leaves(run()))
    for start in range(1, repeats, BURST):
        count = min(BURST, repeats - start)
        filled = [poison() for _ in range(count)]
        del filled  # Queued before the runs, whose results take its place.
        for results in [jax.tree.leaves(run()) for _ in range(count)]:
            tally = add(tally, first, results)
    return first, tally


def _magnitudes(expected):
    """The largest absolute value of each result."""
    import jax.numpy as jnp

    return [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in expected]


def _shares(results, expected, absolute, relative):
    """The largest errors over their tolerances; infinite where a value is not finite."""
    import jax.numpy as jnp

    def share(got, want, absolute, relative):
        error = jnp.abs(got.astype(jnp.float32) - want)
        share = error / (absolute + relative * jnp.abs(want))
        return jnp.max(jnp.where(jnp.isfinite(share), share, jnp.inf))

    return [share(*x) for x in zip(results, expected, absolute, relative, strict=True)]
