"""What bench_embedding.py times: a model's batches of texts, padded or packed."""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import BertConfig, BertModel, with_kernels
from pbjax.buckets import Buckets
from pbjax.inference.embedding import embed
from pbjax.inference.packing import pack

LONGEST = 512


def run(options: argparse.Namespace) -> None:
    """Runs the three and prints them."""
    config = getattr(BertConfig, options.model)()
    model = with_kernels(BertModel(config, dtype=options.dtype, rngs=nnx.Rngs(0)))
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.normal(np.log(options.median), options.spread, options.texts))
    lengths = np.clip(lengths.astype(int), 3, LONGEST)
    texts = [generator.integers(1000, config.vocab_size, length).tolist() for length in lengths]
    by_length = sorted(range(len(texts)), key=lambda index: -lengths[index])
    methods = {
        "padded as they come": partial(padded, model, texts, range(len(texts))),
        "padded by length": partial(padded, model, texts, by_length),
        "packed": partial(embed, model, texts),
    }
    first = None
    for name, method in methods.items():
        vectors, seconds = timed(partial(method, batch_tokens=options.batch_tokens))
        first = vectors if first is None else first
        line = {
            "bench": "embedding",
            "method": name,
            "texts_per_s": round(len(texts) / seconds, 1),
            "tokens_per_s": round(int(lengths.sum()) / seconds),
            "largest_difference": float(np.abs(vectors - first).max()),
            "rows_filled": round(pack(lengths.tolist(), LONGEST).filled, 4),
            "mean_tokens": round(float(lengths.mean()), 1),
            **vars(options),
            "device": jax.devices()[0].device_kind,
            "cores": os.cpu_count(),
            "jax": jax.__version__,
            "python": platform.python_version(),
        }
        print(json.dumps(line), flush=True)


def timed(embed_all: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """Runs twice; returns the result and the seconds of the second time."""
    embed_all()
    start = time.perf_counter()
    return embed_all(), time.perf_counter() - start


def padded(
    model: BertModel, texts: list[list[int]], order: Iterable[int], *, batch_tokens: int
) -> np.ndarray:
    """Embeds texts in a given order, each batch padded to its longest one."""
    graphdef, state = nnx.split(model)
    rooms = Buckets.growing(16, LONGEST, waste=0.25, multiple=16)
    vectors = np.zeros((len(texts), model.config.embed_dim), np.float32)
    waiting = []
    for batch in batches(texts, list(order), rooms, batch_tokens):
        length = rooms.least(max(len(texts[index]) for index in batch))
        ids, mask = np.zeros((2, batch_tokens // length, length), np.int32)
        for row, index in enumerate(batch):
            ids[row, : len(texts[index])] = texts[index]
            mask[row, : len(texts[index])] = 1
        waiting.append((batch, mean(graphdef, state, ids, mask)))
    for batch, found in waiting:
        vectors[batch] = np.asarray(found)[: len(batch)]
    return vectors


def batches(
    texts: list[list[int]], order: list[int], rooms: Buckets, batch_tokens: int
) -> Iterable[list[int]]:
    """Yields as many texts at a time as fit when they are padded."""
    batch: list[int] = []
    longest = 0
    for index in order:
        longer = max(longest, len(texts[index]))
        if batch and (len(batch) + 1) * rooms.least(longer) > batch_tokens:
            yield batch
            batch, longer = [], len(texts[index])
        batch.append(index)
        longest = longer
    yield batch


@partial(jax.jit, static_argnums=0)
def mean(graphdef, state, ids, mask):
    """Returns the means of the token vectors, of length one."""
    hidden = nnx.merge(graphdef, state)(ids, mask).last_hidden_state.astype(jnp.float32)
    weights = mask.astype(jnp.float32)[:, :, None]
    kept = jnp.where(jnp.broadcast_to(weights, hidden.shape) > 0, hidden, 0)
    sums = kept.sum(axis=1)
    return sums / jnp.maximum(jnp.linalg.norm(sums, axis=1, keepdims=True), 1e-9)
