"""What bench_generation.py times: generate, stream, and bare decode steps."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import models
import pbjax
from pbjax.graph.functional import shared_method
from pbjax.text_tables import table_text

PROMPT = 8


def least_s(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Returns the least wall and processor seconds of several calls, after one that compiles."""
    run()
    walls, processors = [], []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return min(walls), min(processors)


def bare(model, prompts: np.ndarray, num_tokens: int) -> Callable[[], object]:
    """Returns a function that runs prefill and then `num_tokens` decode steps."""
    prefill, decode = (shared_method(model, name) for name in ("prefill", "decode"))
    start = jax.jit(prefill.apply)
    step = jax.jit(decode.apply, donate_argnums=2)
    lengths = np.full(len(prompts), PROMPT, np.int32)
    tokens = jnp.ones((len(prompts), 1), jnp.int32)
    num_keys = PROMPT + num_tokens

    def run():
        cache = model.empty_cache(len(prompts), num_keys)
        output = start(prefill.params, prompts, lengths, cache)
        for _ in range(num_tokens):
            output = step(decode.params, tokens, output.cache)
        jax.block_until_ready(output.logits)

    return run


def run(options: argparse.Namespace) -> None:
    """Measures and prints a table and one line of JSON."""
    config = replace(
        models.GPT2Config.small(),
        num_layers=options.layers,
        embed_dim=options.width,
        mlp_dim=4 * options.width,
        num_heads=max(1, options.width // 64),
        vocab_size=1000,
    )
    model = models.GPT2Model(config, rngs=nnx.Rngs(0))
    prompts = np.full((options.batch, PROMPT), 5, np.int32)
    count = options.tokens
    runs = {
        "bare": (bare(model, prompts, count), bare(model, prompts, 1)),
        "generate": tuple(
            lambda n=n: pbjax.generate(model, prompts, max_new_tokens=n) for n in (count + 1, 2)
        ),
        "stream": tuple(
            lambda n=n: list(pbjax.stream(model, prompts, max_new_tokens=n)) for n in (count + 1, 2)
        ),
    }
    found, rows = {}, []
    for name, (long, short) in runs.items():
        times = zip(least_s(long, options.repeats), least_s(short, options.repeats), strict=True)
        wall, processor = ((all_s - first_s) / (count - 1) for all_s, first_s in times)
        found |= {f"{name}_s": wall, f"{name}_processor_s": processor}
        rows.append((name, f"{1e6 * wall:,.0f}", f"{1e6 * processor:,.0f}"))
    print(table_text("microseconds of a step", ("", "on the wall", "of processors"), rows))
    conditions = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "layers": options.layers,
        "width": options.width,
        "batch": options.batch,
        "tokens": count,
    }
    print(json.dumps(conditions | found))
