"""One case of bench_step: a decode step of random layers, optimised, with its bounds."""

import sys
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
from flax import nnx

import models
import pbjax
from models.kernels import with_kernels
from models.kv_cache import KVCache
from pbjax.provenance import provenance_here
from pbjax.step import OptimizedStep

FULL_LAYERS, VOCAB_SIZE = 32, 1024
# What an H200 sustains: products, and reading.
FLOPS_PER_S, BYTES_PER_S = 790e12, 4.5e12
STDDEV = 0.02


def run(case: str, num_layers: int, command: str, *, tiny: bool, compiled, turn):
    """Provenance, row and report of a case: batch x context, and maybe :size+size.

    Args:
      case: Which one.
      num_layers: Of the model.
      command: That measures again.
      tiny: Whether widths are small.
      compiled: A barrier that is passed when all cases have compiled.
      turn: A lock that a case holds from there until it is measured.
    """
    name, _, sizes = case.partition(":")
    batch_size, context = map(int, name.split("x"))
    model, inputs = example(num_layers, batch_size, context, tiny=tiny)
    provenance = provenance_here(jax.devices()[0].device_kind, command)

    waiting = True

    def progress(phase: str, done: int, total: int, item: str) -> None:
        nonlocal waiting
        print(f"  {case}: {phase} {done}/{total} {item}", file=sys.stderr, flush=True)
        if waiting and phase in ("verify", "measure"):  # The first that needs the device alone.
            compiled.wait()
            turn.acquire()
            waiting = False

    split = tuple(map(int, sizes.split("+"))) if sizes else None
    step = pbjax.optimize(model.decode, *inputs, state=1, split=split, progress=progress)
    turn.release()
    row = row_of(step, num_layers, batch_size, context)
    row["bound_s"] = bounds(model, num_layers, batch_size, context)
    return asdict(provenance), row, str(step.report())


def example(num_layers: int, batch_size: int, context: int, *, tiny: bool):
    """LLaMA3-8B with few layers and a small vocabulary, and tokens with a cache of one free place.

    Weights are drawn shape by shape: making the model itself compiles for longer.
    """
    config = replace(models.LlamaConfig.llama3_8b(), num_layers=num_layers, vocab_size=VOCAB_SIZE)
    if tiny:
        config = replace(
            config, embed_dim=256, mlp_dim=512, num_heads=4, num_kv_heads=2, head_dim=64
        )

    def make():
        return with_kernels(models.LlamaModel(config, dtype="bfloat16", rngs=nnx.Rngs(0)))

    keys = iter(jax.random.split(jax.random.key(1, impl="rbg"), 16 * num_layers + 16))
    draw = jax.jit(
        lambda key, scale, shape: (scale * jax.random.normal(key, shape)).astype(jnp.bfloat16),
        static_argnums=(1, 2),
    )
    graph, shapes = nnx.split(nnx.eval_shape(make))
    weights = jax.tree.map(
        lambda x: jnp.ones(x.shape, x.dtype) if x.ndim == 1 else draw(next(keys), STDDEV, x.shape),
        shapes,
    )
    model = nnx.merge(graph, weights)
    empty = jax.eval_shape(lambda: model.empty_cache(batch_size, context))
    arrays = [draw(next(keys), 1.0, empty.keys[0].shape) for _ in range(2 * num_layers)]
    cache = KVCache(
        keys=tuple(arrays[:num_layers]),
        values=tuple(arrays[num_layers:]),
        lengths=jnp.full(batch_size, context - 1, jnp.int32),
    )
    tokens = jax.random.randint(next(keys), (batch_size, 1), 0, VOCAB_SIZE)
    return model, (tokens, cache)


def row_of(step: OptimizedStep, num_layers: int, batch_size: int, context: int) -> dict:
    """What was found out, as JSON-compatible data."""
    programs = {program.name: program for program in step.report().programs}
    seconds = {name: program.measured_s for name, program in programs.items()}
    return {
        "batch": batch_size,
        "context": context,
        "layers": num_layers,
        "sizes": step.plan.sizes,
        "decision": step.plan.decision,
        "reason": step.plan.reason,
        "riding": round(step.report().riding, 3),
        "max_difference": step.plan.max_difference,
        "tokens_per_s_at_32_layers": round(
            batch_size / min(seconds.values()) * num_layers / FULL_LAYERS
        ),
        "seconds": {name: float(f"{s:.4g}") for name, s in seconds.items()},
        "spread_s": {name: float(f"{p.spread_s:.2g}") for name, p in programs.items()},
        "predicted_s": {name: float(f"{p.predicted_s:.4g}") for name, p in programs.items()},
        "compile_s": {name: round(p.compile_s, 1) for name, p in programs.items()},
        "phases_s": {phase.name: round(phase.seconds, 1) for phase in step.report().phases},
    }


def bounds(model: nnx.Module, num_layers: int, batch_size: int, context: int) -> dict[str, float]:
    """Seconds that no program of these layers goes below, on an H200.

    Unsplit, products and reading the caches take turns. Woven they need not, but each sub-batch
    reads all weights.
    """
    layers = jax.tree.leaves(nnx.state(model.layers))
    weights = sum(x.nbytes for x in layers if x.ndim == 2)
    flops = batch_size * sum(2 * x.size for x in layers if x.ndim == 2)
    empty = jax.eval_shape(lambda: model.empty_cache(batch_size, context))
    cache = 2 * num_layers * empty.keys[0].size * 2
    products_s = flops / FLOPS_PER_S
    return {
        "unsplit": max(products_s, weights / BYTES_PER_S) + cache / BYTES_PER_S,
        "woven": max(products_s, (cache + 2 * weights) / BYTES_PER_S),
    }
