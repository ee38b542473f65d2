#!/usr/bin/env python3
"""Measures how far sums of FP8 (e4m3) products lie from exact ones, by length and way of summing.

Values are normal, with a mean of 0, whose products cancel, or of half a deviation, whose sums have
one sign. "short" is how much smaller than the exact ones sums are on average, "rms" the root of the
mean square of the error, in which ours has the rounding to bfloat16 that XLA leaves out here; both
over the root of the mean square of the sums. Taken as exact is XLA's product of highest precision:
cuBLASLt's of FP8 without fast accumulation, which "xla promoted" is too.

    python scripts/bench_fp8_sums.py [--lengths 16384 4096] [--out FILE]
"""

import argparse
import datetime
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
from benchmarks.output_paths import new_file

from pallas_kernels.gemm import quantized_gemm
from pallas_kernels.quantization import Quantized

ROWS = 2_048
MEANS = (0.0, 0.5)
WAYS = [(i, a) for i in ("mosaic_gpu", "xla") for a in ("fast", "promoted")]
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def main() -> None:
    """Reads the options, measures, and prints one line for each length and mean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[768, 4_096, 14_336, 16_384])
    parser.add_argument("--commit", default="", help="recorded")
    parser.add_argument("--out", type=new_file)
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(
            "no NVIDIA GPU here; kernels need a Hopper GPU (sm_90a); run this where one is"
        )
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(compiled, args.lengths))
    rows = []
    for length, program in zip(args.lengths, programs, strict=True):
        for mean in MEANS:
            found = measured(program, length, mean)
            rows.append({"length": length, "mean": mean} | found)
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        provenance = {
            "device_kind": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "commit": args.commit,
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        }
        table = {"schema_version": 1, "provenance": provenance, "rows": rows}
        args.out.write_text(json.dumps(table, indent=1) + "\n")


def compiled(length: int):
    """A program of all ways of summing, and of the exact sums."""
    codes = jax.ShapeDtypeStruct((ROWS, length), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((ROWS,), jnp.float32)

    def run(x, w, ones):
        x, w = Quantized(x, ones), Quantized(w, ones)
        sums = [quantized_gemm(x, w, implementation=i, accumulation=a) for i, a in WAYS]
        exact = jnp.matmul(
            x.values.astype(jnp.float32), w.values.astype(jnp.float32).T, precision="highest"
        )
        return [statistics(y.astype(jnp.float32), exact) for y in sums]

    return jax.jit(run, compiler_options=COMPILER_OPTIONS).lower(codes, codes, scales).compile()


def statistics(y, exact):
    """How far sums fall short on average, and the error's root of the mean square."""
    square = jnp.mean(exact * exact)
    return 1 - jnp.mean(y * exact) / square, jnp.sqrt(jnp.mean((y - exact) ** 2) / square)


def measured(program, length: int, mean: float) -> dict[str, dict[str, float]]:
    """The statistics of each way, by its names."""

    def codes(key):
        values = 90 * (jax.random.normal(key, (ROWS, length)) + mean)
        return jnp.clip(values, -448, 448).astype(jnp.float8_e4m3fn)

    x, w = map(codes, jax.random.split(jax.random.key(length)))
    found = program(x, w, jnp.ones(ROWS, jnp.float32))
    return {
        f"{implementation} {accumulation}": {
            "short": float(f"{float(short):.3g}"),
            "rms": float(f"{float(rms):.3g}"),
        }
        for (implementation, accumulation), (short, rms) in zip(WAYS, found, strict=True)
    }


if __name__ == "__main__":
    main()
