"""Attention of the six models, and a sweep of lengths and head sizes, against cuDNN and XLA."""

import functools

import jax
import jax.numpy as jnp

from models.conformer.positions import relative_bias
from pallas_kernels.attention import (
    attention,
    attention_packed,
    attention_packed_reference,
    attention_reference,
)
from pallas_kernels.attention.shapes import (
    CAPPED,
    MODELS,
    PACKED,
    PACKED_RAGGED,
    RAGGED,
    SWEEP,
    AttentionShape,
    PackedShape,
)

from . import Case


def cases() -> list[Case]:
    """Models and sweep on all SMs, BERT on half of them, and ragged shapes in both dtypes."""
    found = [_case(shape, "bfloat16", None, timed=True) for shape in [*MODELS, *CAPPED, *SWEEP]]
    bert = next(shape for shape in MODELS if shape.name.startswith("bert"))
    found.append(_case(bert, "bfloat16", 66, timed=True))
    found += [_packed_case(shape, "bfloat16", None, timed=True) for shape in PACKED]
    for dtype in ("bfloat16", "float16"):
        found += [_case(shape, dtype, 7, timed=False) for shape in RAGGED]
        found += [_packed_case(shape, dtype, 7, timed=False) for shape in PACKED_RAGGED]
    return found


def _names(shape: AttentionShape) -> list[str]:
    terms = {
        "lengths": shape.lengths,
        "query_lengths": shape.query_lengths,
        "query_starts": shape.query_starts,
        "alibi_slopes": shape.alibi,
        "bias": shape.bias_batch,
        "key_bias": shape.key_bias,
        "relative_rows": shape.relative,
        "relative_shift": shape.relative,
    }
    return ["q", "k", "v"] + [name for name, present in terms.items() if present]


def _case(shape: AttentionShape, dtype: str, sm_budget: int | None, *, timed: bool) -> Case:
    names = _names(shape)
    options = {"causal": shape.causal, "window": shape.window, "scale": shape.head_dim**-0.5}
    options["softcap"] = shape.softcap

    def call(f, **extra):
        return lambda *inputs: f(**dict(zip(names, inputs, strict=True)), **(options | extra))

    opponents = {}
    if timed:
        opponents = {"cudnn": functools.partial(_cudnn, shape, names)}
        if shape.softcap is not None:  # cuDNN does not have it: what it costs beside none.
            opponents = {"cudnn, no cap": opponents["cudnn"]}
            opponents["ours, no cap"] = call(attention, implementation="mosaic_gpu", softcap=None)
        if shape.softcap or shape.alibi or shape.bias_batch or shape.relative:
            opponents["xla"] = call(attention, implementation="xla")
        if shape.relative:
            opponents["ours, bias by xla"] = functools.partial(_with_bias, shape, names)
    b, t, s, n, h = (
        shape.batch_size,
        shape.num_queries,
        shape.num_keys,
        shape.num_heads,
        shape.head_dim,
    )
    pairs = t * (t + 1) // 2 if shape.causal else t * (shape.num_valid_keys or s)
    moved = 2 * b * h * (t * n + s * shape.num_kv_heads) + shape.bias_batch * n * t * s
    moved += (t + s) * n * h if shape.relative else 0
    products = 6 if shape.relative else 4
    return Case(
        kernel="attention",
        name=shape.name if sm_budget is None else f"{shape.name}, {sm_budget} SMs",
        dtype=dtype,
        make=functools.partial(_make, shape, dtype, full=timed),
        run=call(attention, implementation="mosaic_gpu", sm_budget=sm_budget),
        reference=functools.partial(_reference, shape, names, options),
        close=({"reduction": s, "roundings": 1},),
        opponents=opponents,
        flops=products * b * n * h * pairs if timed else 0,
        num_bytes=2 * moved,
    )


def _reference(shape: AttentionShape, names, options, *inputs):
    """The truth, one sequence after the other: the scores of all would fill the device."""
    shared = {"alibi_slopes", "relative_rows", "relative_shift"}
    shared |= {"bias"} if shape.bias_batch == 1 else set()
    given = dict(zip(names, inputs, strict=True))
    fixed = {name: x for name, x in given.items() if name in shared}

    def one(sequence):
        alone = {name: x[None] for name, x in sequence.items()}
        return attention_reference(**alone, **fixed, **options)[0]

    return jax.lax.map(one, {name: x for name, x in given.items() if name not in shared})


def _bias_by_difference(shape: AttentionShape, given):
    """Scores by difference in memory, brought to their keys: made by XLA, as models did it."""
    rows = given["relative_rows"][: 2 * shape.num_queries - 1]
    return relative_bias(given["q"], rows, given["relative_shift"]) * shape.head_dim**-0.5


def _with_bias(shape: AttentionShape, names, *inputs):
    """Our kernel, scores by difference as a bias in memory."""
    given = dict(zip(names, inputs, strict=True))
    plain = {name: x for name, x in given.items() if not name.startswith("relative")}
    bias = _bias_by_difference(shape, given)
    scale = shape.head_dim**-0.5
    return attention(**plain, bias=bias, scale=scale, implementation="mosaic_gpu")


def _cudnn(shape: AttentionShape, names, *inputs):
    """The library's kernel; ALiBi as a bias in memory, which it needs."""
    given = dict(zip(names, inputs, strict=True))
    q, k, v, bias = given["q"], given["k"], given["v"], given.get("bias")
    if shape.alibi:
        i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
        distance = jnp.abs(i - j).astype(jnp.float32)[None, None]
        bias = (-given["alibi_slopes"][None, :, None, None] * distance).astype(q.dtype)
    if shape.relative:
        bias = _bias_by_difference(shape, given)
    if shape.key_bias:  # a mask of whole size, which it reads as a bias
        hidden = given["key_bias"].astype(q.dtype)[:, None, None]
        bias = jnp.broadcast_to(hidden, (q.shape[0], 1, q.shape[1], k.shape[1]))
    lengths = given.get("lengths")
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        scale=shape.head_dim**-0.5,
        is_causal=shape.causal,
        query_seq_lengths=None if lengths is None else jnp.full_like(lengths, q.shape[1]),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def _make(shape: AttentionShape, dtype: str, key, *, full: bool):
    keys = jax.random.split(key, 9)
    b, t, s = shape.batch_size, shape.num_queries, shape.num_keys
    cache = (b, s, shape.num_kv_heads, shape.head_dim)
    shapes = [(b, t, shape.num_heads, shape.head_dim), cache, cache]
    arrays = [jax.random.normal(k, x, dtype) for k, x in zip(keys[:3], shapes, strict=True)]
    if shape.lengths:
        drawn = jax.random.randint(keys[3], (b,), 0, s + 1)
        arrays.append(jnp.full(b, shape.num_valid_keys or s, jnp.int32) if full else drawn)
    if shape.query_lengths:
        arrays.append(jnp.minimum(arrays[-1], t))
    if shape.query_starts:
        arrays.append(jax.random.randint(keys[4], (b,), 0, max(s - t, 0) + 1))
    if shape.alibi:
        heads = jnp.arange(shape.num_heads, dtype=jnp.float32)
        arrays.append(2.0 ** (-8 * (heads + 1) / shape.num_heads))
    if shape.bias_batch:
        arrays.append(jax.random.normal(keys[5], (shape.bias_batch, shape.num_heads, t, s), dtype))
    if shape.key_bias:
        hidden = jax.random.bernoulli(keys[8], 0.5, (b, s))
        arrays.append(jnp.where(hidden, -1e30, jax.random.normal(keys[3], (b, s))))
    if shape.relative:
        one = (shape.num_heads, shape.head_dim)
        arrays.append(jax.random.normal(keys[6], (t + s, *one), dtype))
        arrays.append(jax.random.normal(keys[7], one, dtype))
    return tuple(arrays)


def _packed_case(shape: PackedShape, dtype: str, sm_budget: int | None, *, timed: bool) -> Case:
    options = {"causal": shape.causal, "window": shape.window, "scale": shape.head_dim**-0.5}

    def call(f, **extra):
        def run(q, k, v, offsets, slopes, *_):
            return f(q, k, v, offsets, alibi_slopes=slopes, **options, **extra)

        return run

    pairs = sum(t * (t + 1) // 2 if shape.causal else t * t for t in shape.lengths)
    width = shape.num_heads + shape.num_kv_heads
    return Case(
        kernel="attention",
        name=shape.name if sm_budget is None else f"{shape.name}, {sm_budget} SMs",
        dtype=dtype,
        make=functools.partial(_make_packed, shape, dtype, padded=timed),
        run=call(attention_packed, implementation="mosaic_gpu", sm_budget=sm_budget),
        reference=call(attention_packed_reference),
        close=({"reduction": max(shape.lengths), "roundings": 1},),
        opponents={"cudnn, padded": functools.partial(_cudnn_padded, shape)} if timed else {},
        flops=4 * shape.num_heads * shape.head_dim * pairs if timed else 0,
        num_bytes=4 * shape.head_dim * shape.num_rows * width,
    )


def _cudnn_padded(shape: PackedShape, *inputs):
    """The library on the same sequences, each padded to the longest, which its inputs were."""
    q, k, v, lengths = inputs[5:]
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=shape.head_dim**-0.5,
        is_causal=shape.causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )


def _make_packed(shape: PackedShape, dtype: str, key, *, padded: bool):
    keys = jax.random.split(key, 6)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)

    def draw(keys, *batch):
        return [
            jax.random.normal(k, (*batch, n, shape.head_dim), dtype)
            for k, n in zip(keys, heads, strict=True)
        ]

    slopes = 2.0 ** (-jnp.arange(shape.num_heads, dtype=jnp.float32)) if shape.alibi else None
    arrays = [*draw(keys[:3], shape.num_rows), jnp.asarray(shape.offsets), slopes]
    if padded:
        arrays += draw(keys[3:], len(shape.lengths), max(shape.lengths))
        arrays.append(jnp.asarray(shape.lengths, jnp.int32))
    return tuple(arrays)
