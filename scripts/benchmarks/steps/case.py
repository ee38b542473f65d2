"""One case of bench_step: a decode step of random layers, optimised, with its bounds."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import models
import pbjax
from models.kernels import with_kernels
from models.kv_cache import KVCache
from pbjax.device import Device, find_device
from pbjax.errors import InputError
from pbjax.runtime.provenance import provenance_here

FULL_LAYERS, VOCAB_SIZE = 32, 1024
# What an H200 sustains: products, and reading.
FLOPS_PER_S, BYTES_PER_S = 790e12, 4.5e12
STDDEV = 0.02
# Of a process beside its arrays: the driver's context, programs and temporaries.
PROCESS_BYTES = 1_500_000_000


def run(
    case: str,
    cases: Sequence[str],
    num_layers: int,
    command: str,
    *,
    tiny: bool,
    wait: Callable[[], None],
) -> tuple[dict, dict, str]:
    """Provenance, row and report of a case: batch x context, and maybe :size+size.

    Args:
      case: Which one.
      cases: All that share the device's memory, this one included.
      num_layers: Layers of the model.
      command: The command that measures again.
      tiny: Whether widths are small.
      wait: Called when this case has compiled; returns when it is its turn to measure.

    Raises:
      InputError: The cases together do not fit the device.
    """
    batch_size, context, sizes = parsed(case)
    kind = jax.devices()[0].device_kind
    provenance = provenance_here(kind, command)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: make(num_layers, tiny=tiny)))
    check_memory(cases, nnx.merge(graph, shapes), find_device(kind, os.cpu_count() or 1))
    model, inputs = example(graph, shapes, batch_size, context)
    waiting = True

    def progress(phase: str, done: int, total: int, item: str) -> None:
        nonlocal waiting
        print(f"  {case}: {phase} {done}/{total} {item}", file=sys.stderr, flush=True)
        if waiting and phase in ("verify", "measure"):  # The first that needs the device alone.
            wait()
            waiting = False

    step = pbjax.optimize(model.decode, *inputs, state=1, split=sizes, progress=progress)
    row = row_of(step, num_layers, batch_size, context)
    row["bound_s"] = bounds(model, num_layers, batch_size, context)
    return asdict(provenance), row, str(step.report())


def parsed(case: str) -> tuple[int, int, tuple[int, ...] | None]:
    """Batch size, context, and sizes of the sub-batches if they are given.

    Raises:
      InputError: The text is not such a case.
    """
    name, _, sizes = case.partition(":")
    try:
        batch_size, context = map(int, name.split("x"))
        return batch_size, context, tuple(map(int, sizes.split("+"))) if sizes else None
    except ValueError:
        raise InputError(
            f"--cases {case}: not a case; batch x context, and maybe sizes of sub-batches, are "
            "allowed; write it as 1024x512 or 1024x512:512+512"
        ) from None


def make(num_layers: int, *, tiny: bool) -> models.LlamaModel:
    """LLaMA3-8B with few layers and a small vocabulary."""
    config = replace(models.LlamaConfig.llama3_8b(), num_layers=num_layers, vocab_size=VOCAB_SIZE)
    if tiny:
        config = replace(
            config, embed_dim=256, mlp_dim=512, num_heads=4, num_kv_heads=2, head_dim=64
        )
    return with_kernels(models.LlamaModel(config, dtype="bfloat16", rngs=nnx.Rngs(0)))


def check_memory(cases: Sequence[str], model: models.LlamaModel, device: Device) -> None:
    """Refuses cases that do not fit the device together.

    All hold their weights and one layer's cache from the start, and the one that measures two
    caches of all layers: what two programs return is compared.

    Args:
      cases: The cases that share the memory.
      model: The model, its weights shapes only.
      device: With its memory.

    Raises:
      InputError: They do not fit.
    """
    weights = nbytes(nnx.state(model))
    caches = [
        nbytes(jax.eval_shape(partial(model.empty_cache, *parsed(case)[:2]))) for case in cases
    ]
    layers = len(model.layers)
    waiting = len(cases) * (weights + PROCESS_BYTES) + sum(caches) // layers
    if waiting + 2 * max(caches) > device.memory_bytes:
        raise InputError(
            f"--layers {layers} --cases {' '.join(cases)}: {len(cases)} processes hold "
            f"{waiting / 1e9:.1f} GB while they wait, and one that measures "
            f"{2 * max(caches) / 1e9:.1f} GB more; {device.memory_bytes / 1e9:.1f} GB of "
            f"{device.kind!r} are there; take fewer layers or cases"
        )


def nbytes(tree: object) -> int:
    """Bytes of all arrays, or shapes of arrays, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def example(
    graph: nnx.GraphDef, shapes: nnx.State, batch_size: int, context: int
) -> tuple[models.LlamaModel, tuple[jax.Array, KVCache]]:
    """The model, and tokens with a cache of one free place.

    Weights are drawn shape by shape: making the model itself compiles for longer. The layers of the
    example share one cache, of which every call gets a copy for each layer: processes that wait for
    their turn hold little.
    """
    keys = iter(jax.random.split(jax.random.key(1, impl="rbg"), len(jax.tree.leaves(shapes)) + 3))
    draw = jax.jit(
        lambda key, scale, shape: (scale * jax.random.normal(key, shape)).astype(jnp.bfloat16),
        static_argnums=(1, 2),
    )
    weights = jax.tree.map(
        lambda x: jnp.ones(x.shape, x.dtype) if x.ndim == 1 else draw(next(keys), STDDEV, x.shape),
        shapes,
    )
    model = nnx.merge(graph, weights)
    empty = jax.eval_shape(lambda: model.empty_cache(batch_size, context))
    cache = KVCache(
        keys=(draw(next(keys), 1.0, empty.keys[0].shape),) * len(empty.keys),
        values=(draw(next(keys), 1.0, empty.values[0].shape),) * len(empty.values),
        lengths=jnp.full(batch_size, context - 1, jnp.int32),
    )
    tokens = jax.random.randint(next(keys), (batch_size, 1), 0, VOCAB_SIZE)
    return model, (tokens, cache)


def row_of(step: pbjax.Optimized, num_layers: int, batch_size: int, context: int) -> dict:
    """The results as JSON-compatible data."""
    programs = {program.name: program for program in step.report().programs}
    seconds = {name: program.measured_s for name, program in programs.items()}
    return {
        "batch": batch_size,
        "context": context,
        "layers": num_layers,
        "sizes": step.plan.sizes,
        "decision": step.plan.decision,
        "reason": step.plan.reason,
        "overlapped_fraction": round(step.report().state.overlapped_fraction, 3),
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


def bounds(
    model: models.LlamaModel, num_layers: int, batch_size: int, context: int
) -> dict[str, float]:
    """Seconds that no program of these layers goes below, on an H200.

    Unsplit, products and reading the caches take turns. Interleaved they need not, but each
    sub-batch reads all weights.
    """
    layers = jax.tree.leaves(nnx.state(model.layers))
    weights = sum(x.nbytes for x in layers if x.ndim == 2)
    flops = batch_size * sum(2 * x.size for x in layers if x.ndim == 2)
    empty = jax.eval_shape(lambda: model.empty_cache(batch_size, context))
    cache = 2 * num_layers * empty.keys[0].size * 2
    products_s = flops / FLOPS_PER_S
    return {
        "unsplit": max(products_s, weights / BYTES_PER_S) + cache / BYTES_PER_S,
        "interleaved": max(products_s, (cache + 2 * weights) / BYTES_PER_S),
    }
