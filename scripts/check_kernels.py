#!/usr/bin/env python3
"""Checks every kernel on the GPU against its float32 reference, on fresh random inputs.

Memory of the size of each result is filled with NaN and freed before each run, so that what a
kernel does not write shows. Runs are repeated and compared bit for bit: a difference is a race.
Arrays of a known pattern lie around the kernel's and are read afterwards.

    python scripts/check_kernels.py [--kernels gemm norm] [--pattern bert] [--repeats 3] [--workers
8]
"""

import argparse
import functools
import secrets
import sys
import time

from kernel_cases import MODULES, load_cases, pool

CANARY_BYTES, CANARIES, CANARY = 1 << 20, 32, 0x5A
# The truth need not be fast: searching the fastest products of f32 takes minutes.
REFERENCE_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def main() -> int:
    """Runs the checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=MODULES)
    parser.add_argument("--pattern", default="", help="only cases whose name holds this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    args = parser.parse_args()
    pool.require_gpu()
    start, cases = time.time(), load_cases(tuple(args.kernels), args.pattern)
    prepare = functools.partial(_prepare, tuple(args.kernels), args.pattern, args.seed)
    measure = functools.partial(_check, args.repeats)
    failed = 0
    print(f"{len(cases)} cases, seed {args.seed}")
    for index, (worst, problem) in (
        (i, result if isinstance(result, tuple) else (float("nan"), result))
        for i, result in pool.run(
            prepare, measure, list(range(len(cases))), args.workers, quiet=False
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

    case = load_cases(kernels, pattern)[index]
    key = jax.random.fold_in(jax.random.key(seed), index)
    shapes = jax.eval_shape(case.make, key)
    results = jax.tree.leaves(jax.eval_shape(case.run, *shapes))
    expected = jax.tree.leaves(jax.eval_shape(case.reference, *shapes))
    bounds = [jax.ShapeDtypeStruct((), jnp.float32)] * len(results)

    def poison():
        return [jnp.full(x.shape, jnp.nan, case.dtype) for x in expected]

    reference = jax.jit(case.reference, compiler_options=REFERENCE_OPTIONS)
    return (
        case,
        functools.partial(jax.jit(case.make).lower(key).compile(), key),
        jax.jit(case.run).lower(*shapes).compile(),
        reference.lower(*shapes).compile(),
        jax.jit(poison).lower().compile(),
        jax.jit(_compare).lower(results, results, expected).compile(),
        jax.jit(_shares).lower(results, expected, bounds, bounds).compile(),
    )


def _check(repeats, _, prepared):
    """Returns the worst share of the tolerance, and what is wrong, if anything is."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.testing import tolerance

    case, make, run, reference, poison, compare, shares = prepared
    inputs = make()
    expected = jax.tree.leaves(reference(*inputs))
    canaries = [jnp.full((CANARY_BYTES,), CANARY, jnp.uint8) for _ in range(CANARIES)]
    results = []
    for _ in range(repeats):
        jax.block_until_ready(poison())
        results.append(jax.block_until_ready(jax.tree.leaves(run(*inputs))))
    if not all(np.all(np.asarray(canary) == CANARY) for canary in canaries):
        return float("nan"), "a canary was overwritten"
    same, magnitudes = compare(results[0], results[0], expected)
    for again in results[1:]:
        same, _ = compare(results[0], again, expected)
        if not all(map(bool, same)):
            return float("nan"), "results differ between runs"
    bounds = [
        tolerance(x.dtype, magnitude=float(magnitude), **close)
        for x, magnitude, close in zip(results[0], magnitudes, case.close, strict=True)
    ]
    absolute = [np.float32(bound.absolute) for bound in bounds]
    relative = [np.float32(bound.relative) for bound in bounds]
    worst = max(map(float, shares(results[0], expected, absolute, relative)))
    return worst, "" if worst <= 1 else f"error is {worst:.3g} times the tolerance"


def _compare(first, again, expected):
    """Whether two runs gave the same bits, and the largest absolute value of what is expected."""
    import jax
    import jax.numpy as jnp

    def bits(x):
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        return jax.lax.bitcast_convert_type(x, kind)

    same = [jnp.all(bits(a) == bits(b)) for a, b in zip(first, again, strict=True)]
    return same, [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in expected]


def _shares(results, expected, absolute, relative):
    """The largest errors over their tolerances; infinite where a value is not finite."""
    import jax.numpy as jnp

    def share(got, want, absolute, relative):
        error = jnp.abs(got.astype(jnp.float32) - want)
        share = error / (absolute + relative * jnp.abs(want))
        return jnp.max(jnp.where(jnp.isfinite(share), share, jnp.inf))

    return [share(*x) for x in zip(results, expected, absolute, relative, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
