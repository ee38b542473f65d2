#!/usr/bin/env python3
"""Times decode steps of LLaMA3-8B layers: the whole batch, and two woven halves (optimize(state=)).

Random weights and caches at full width, few layers, a small vocabulary so that layers are what is
timed. Prints the report of each optimised step, one table, and one line of JSON.

    python scripts/bench_step.py [--layers 6] [--cases 512x1024 1024x512] [--out FILE]
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import models
import pbjax
from models.kernels import with_kernels
from models.kv_cache import KVCache
from pbjax.provenance import provenance_here

FULL_LAYERS, VOCAB_SIZE = 32, 1024


def main() -> None:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["512x1024", "768x512", "1024x512", "256x2048"],
        help="batch x context",
    )
    parser.add_argument("--tiny", action="store_true", help="small widths, to try the script")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    model = with_kernels(random_model(args.layers, tiny=args.tiny))
    rows = [run(model, args.layers, *map(int, case.split("x"))) for case in args.cases]
    print(f"\n{args.layers} layers; tokens per second of the kept program for {FULL_LAYERS}")
    print("batch  context  unsplit ms  in sequence  woven  woven over unsplit  tokens/s  rows")
    for row in rows:
        print(line(row))
    command = " ".join(["python", *sys.argv])
    provenance = provenance_here(jax.devices()[0].device_kind, command)
    result = {"schema_version": 1, "provenance": asdict(provenance), "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def random_model(num_layers: int, *, tiny: bool) -> nnx.Module:
    """LLaMA3-8B with few layers, a small vocabulary and random weights."""
    config = replace(models.LlamaConfig.llama3_8b(), num_layers=num_layers, vocab_size=VOCAB_SIZE)
    if tiny:
        config = replace(
            config, embed_dim=256, mlp_dim=512, num_heads=4, num_kv_heads=2, head_dim=64
        )
    make = nnx.jit(lambda: models.LlamaModel(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    return make()


def run(model: nnx.Module, num_layers: int, batch_size: int, context: int) -> dict:
    """Optimises the decode step at one batch and context; the caches are full but for one token."""
    empty = jax.eval_shape(lambda: model.empty_cache(batch_size, context))
    keys = jax.random.split(jax.random.key(1), 2 * num_layers)
    draw = jax.jit(lambda key: jax.random.normal(key, empty.keys[0].shape, jnp.bfloat16))
    arrays = tuple(draw(key) for key in keys)
    cache = KVCache(
        keys=arrays[:num_layers],
        values=arrays[num_layers:],
        lengths=jnp.full(batch_size, context - 1, jnp.int32),
    )
    tokens = jax.random.randint(jax.random.key(2), (batch_size, 1), 0, VOCAB_SIZE)
    step = pbjax.optimize(model.decode, tokens, cache, state=1, progress=show)
    print(step.report(), flush=True)
    programs = {program.name: program for program in step.report().programs}
    seconds = {name: program.measured_s for name, program in programs.items()}
    kept = seconds["unsplit" if step.plan.decision == "unsplit" else "woven"]
    return {
        "batch": batch_size,
        "context": context,
        "layers": num_layers,
        "sizes": step.plan.sizes,
        "decision": step.plan.decision,
        "riding": round(step.report().riding, 3),
        "max_difference": step.plan.max_difference,
        "tokens_per_s_at_32_layers": round(batch_size / kept * num_layers / FULL_LAYERS),
        "seconds": {name: float(f"{s:.4g}") for name, s in seconds.items()},
        "spread_s": {name: float(f"{p.spread_s:.2g}") for name, p in programs.items()},
        "predicted_s": {name: float(f"{p.predicted_s:.4g}") for name, p in programs.items()},
        "compile_s": {name: round(p.compile_s, 1) for name, p in programs.items()},
    }


def show(phase: str, done: int, total: int, item: str) -> None:
    """Prints where the work is."""
    print(f"  {phase} {done}/{total} {item}", file=sys.stderr, flush=True)


def line(row: dict) -> str:
    """One row of the table."""
    unsplit, sequence, woven = (
        row["seconds"].get(name) for name in ("unsplit", "sequential", "woven")
    )
    if woven is None:
        return f"{row['batch']:5d} {row['context']:8d}  nothing can ride"
    return (
        f"{row['batch']:5d} {row['context']:8d} {unsplit * 1e3:11.3f} {sequence * 1e3:12.3f} "
        f"{woven * 1e3:6.3f} {unsplit / woven:18.3f}x {row['tokens_per_s_at_32_layers']:9,d}  "
        f"{'+'.join(map(str, row['sizes']))}"
    )


if __name__ == "__main__":
    main()
