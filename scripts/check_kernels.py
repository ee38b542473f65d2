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
    import jax

    case = load_cases(kernels, pattern)[index]
    key = jax.random.fold_in(jax.random.key(seed), index)
    shapes = jax.eval_shape(case.make, key)
    make = jax.jit(case.make).lower(key).compile()
    run = jax.jit(case.run).lower(*shapes).compile()
    reference = jax.jit(case.reference, compiler_options=REFERENCE_OPTIONS)
    reference = reference.lower(*shapes).compile()
    return case, functools.partial(make, key), run, reference


def _check(repeats, _, prepared):
    """Returns the worst share of the tolerance, and what is wrong, if anything is."""
    import jax
    import jax.numpy as jnp

    case, make, run, reference = prepared
    inputs = make()
    expected = jax.tree.leaves(reference(*inputs))
    canaries = [jnp.full((CANARY_BYTES,), CANARY, jnp.uint8) for _ in range(CANARIES)]
    results = []
    for _ in range(repeats):
        poison = [jnp.full(x.shape, jnp.nan, case.dtype) for x in expected]
        jax.block_until_ready(poison)
        del poison
        results.append(jax.block_until_ready(jax.tree.leaves(run(*inputs))))
    if not all(bool(jnp.all(canary == CANARY)) for canary in canaries):
        return float("nan"), "a canary was overwritten"
    for again in results[1:]:
        if not all(map(_same_bits, results[0], again)):
            return float("nan"), "results differ between runs"
    shares = [
        _share(got, want, close)
        for got, want, close in zip(results[0], expected, case.close, strict=True)
    ]
    worst = max(shares)
    return worst, "" if worst <= 1 else f"error is {worst:.3g} times the tolerance"


def _same_bits(a, b) -> bool:
    import jax
    import jax.numpy as jnp

    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    return bool(
        jnp.all(jax.lax.bitcast_convert_type(a, bits) == jax.lax.bitcast_convert_type(b, bits))
    )


def _share(got, want, close) -> float:
    """The largest error over its tolerance; infinite where a value is not finite."""
    import jax.numpy as jnp

    from pallas_kernels.testing import tolerance

    bound = tolerance(got.dtype, magnitude=float(jnp.max(jnp.abs(want))), **close)
    error = jnp.abs(got.astype(jnp.float32) - want)
    share = error / (bound.absolute + bound.relative * jnp.abs(want))
    return float(jnp.max(jnp.where(jnp.isfinite(share), share, jnp.inf)))


if __name__ == "__main__":
    sys.exit(main())
