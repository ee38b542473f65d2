"""Decode attention of the decoders, on all SMs and on 48, against cuDNN and XLA."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention import decode_attention, decode_attention_reference
from pallas_kernels.decode_attention.shapes import MODELS, RAGGED, DecodeShape

from . import Case


def cases() -> list[Case]:
    """Models on all SMs and on 48, and ragged shapes in both dtypes."""
    found = [_case(shape, "bfloat16", sms, timed=True) for shape in MODELS for sms in (None, 48)]
    return found + [
        _case(shape, dtype, sms, timed=False)
        for shape in RAGGED
        for dtype, sms in (("bfloat16", None), ("float16", 7))
    ]


def _case(shape: DecodeShape, dtype: str, sm_budget: int | None, *, timed: bool) -> Case:
    names = ["q", "k", "v", "lengths"]
    names += ["page_table"] * bool(shape.page_size) + ["alibi_slopes"] * shape.alibi
    scale = shape.head_dim**-0.5

    def call(f, **extra):
        fixed = {"scale": scale, "softcap": shape.softcap, **extra}
        return lambda *inputs: f(**dict(zip(names, inputs, strict=True)), **fixed)

    opponents = {}
    if timed and not (shape.alibi or shape.page_size):
        opponents = {"cudnn": functools.partial(_cudnn, scale)}
    elif timed:
        opponents = {"xla": call(decode_attention, implementation="xla")}
    return Case(
        kernel="decode_attention",
        name=shape.name if sm_budget is None else f"{shape.name}, {sm_budget} SMs",
        dtype=dtype,
        make=functools.partial(_make, shape, dtype),
        run=call(decode_attention, implementation="mosaic_gpu", sm_budget=sm_budget),
        reference=call(functools.partial(_reference, shape)),
        close=({"reduction": shape.num_keys, "roundings": 1},),
        opponents=opponents,
        num_bytes=shape.cache_bytes,
    )


def _reference(shape: DecodeShape, *, scale, softcap, **given):
    """The truth, one sequence after the other: repeated heads in f32 would take much room."""
    shared = {"alibi_slopes", "k", "v"} if shape.page_size else {"alibi_slopes"}
    fixed = {name: x for name, x in given.items() if name in shared}

    def one(sequence):
        alone = {name: x[None] for name, x in sequence.items()}
        return decode_attention_reference(**alone, **fixed, scale=scale, softcap=softcap)[0]

    return jax.lax.map(one, {name: x for name, x in given.items() if name not in shared})


def _cudnn(scale, q, k, v, lengths):
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        query_seq_lengths=jnp.full_like(lengths, q.shape[1]),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def _make(shape: DecodeShape, dtype: str, key):
    keys = jax.random.split(key, 5)
    b, s, n = shape.batch_size, shape.num_keys, shape.num_heads
    cache, table = (b, s, shape.num_kv_heads, shape.head_dim), []
    if shape.page_size:
        pages = s // shape.page_size
        pool = b * pages + 3
        table = [jax.random.permutation(keys[4], pool)[: b * pages].reshape(b, pages)]
        cache = (pool, shape.page_size, shape.num_kv_heads, shape.head_dim)
    q = jax.random.normal(keys[0], (b, shape.num_tokens, n, shape.head_dim), dtype)
    k, v = (jax.random.normal(key, cache, dtype) for key in keys[1:3])
    drawn = jax.random.randint(keys[3], (b,), 0, s + 1)
    lengths = jnp.full(b, s, jnp.int32) if shape.full else drawn
    heads = jnp.arange(n, dtype=jnp.float32)
    slopes = [2.0 ** (-8 * (heads + 1) / n)] if shape.alibi else []
    return (q, k, v, lengths, *table, *slopes)
