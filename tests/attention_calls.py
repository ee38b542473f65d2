"""Calls of the attention kernel for tests: random operands of a shape, and ways to run them."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.attention import attention, attention_reference, mosaic_gpu
from pallas_kernels.attention.shapes import SHAPES, AttentionShape
from pallas_kernels.attention.tile import Tile
from pallas_kernels.testing import assert_close
from tests import kernel_layers

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
SMALL = Tile(block_kv=64)
BY_NAME = {case.name: case for case in SHAPES}
NO_TERMS = dict.fromkeys(
    (
        *("window", "lengths", "query_lengths", "query_starts", "alibi_slopes", "bias"),
        *("key_bias", "relative_rows", "relative_shift", "softcap"),
    )
)


def shape(t, s, *, n=1, k=1, h=32, batch_size=1, **terms):
    return AttentionShape(
        name="test",
        batch_size=batch_size,
        num_queries=t,
        num_keys=s,
        num_heads=n,
        num_kv_heads=k,
        head_dim=h,
        **terms,
    )


def operands(case, *, dtype=jnp.bfloat16, lengths=None, starts=None):
    """Random q, k, v of a shape, and its terms."""
    keys = jax.random.split(jax.random.key(0), 9)
    b, t, s, n, h = case.batch_size, case.num_queries, case.num_keys, case.num_heads, case.head_dim
    q = jax.random.normal(keys[0], (b, t, n, h), dtype)
    k, v = (jax.random.normal(key, (b, s, case.num_kv_heads, h), dtype) for key in keys[1:3])
    terms = NO_TERMS | {"causal": case.causal, "window": case.window, "scale": h**-0.5}
    terms["softcap"] = case.softcap
    if case.lengths:
        drawn = jax.random.randint(keys[3], (b,), 0, s + 1)
        terms["lengths"] = drawn if lengths is None else jnp.array(lengths, jnp.int32)
    if case.query_lengths:
        terms["query_lengths"] = jnp.minimum(terms["lengths"], t)
    if case.query_starts:
        drawn = jax.random.randint(keys[4], (b,), 0, max(s - t, 0) + 1)
        terms["query_starts"] = drawn if starts is None else jnp.array(starts, jnp.int32)
    if case.alibi:
        terms["alibi_slopes"] = 2.0 ** (-8 * (jnp.arange(n, dtype=jnp.float32) + 1) / n)
    if case.bias_batch:
        terms["bias"] = jax.random.normal(keys[5], (case.bias_batch, n, t, s), dtype)
    if case.key_bias:
        drawn, place = jax.random.normal(keys[8], (b, s)), jnp.arange(s)[None]
        drawn = jnp.where((drawn > 0) & (place < 3 * s // 4), drawn, -jnp.inf)
        terms["key_bias"] = jnp.where(place < s // 4, 0.0, drawn)  # tiles of zeros, of all kinds
    if case.relative:
        terms["relative_rows"] = jax.random.normal(keys[6], (t + s - 1, n, h), dtype)
        terms["relative_shift"] = jax.random.normal(keys[7], (n, h), dtype)
    return (q, k, v), terms


def interpreted(args, terms, tile=SMALL):
    """The kernel's result on two CTAs in the interpreter, which must see no race."""

    def run(q, k, v):
        return mosaic_gpu.attention(q, k, v, **terms, sms=2, tile=tile, interpret=True)

    return kernel_layers.interpreted(run, *args)


def assert_right(actual, args, terms):
    """The weights are rounded once before they meet the values; scores are sums over the head."""
    expected = attention_reference(*args, **terms)
    assert_close(actual, expected, reduction=args[1].shape[1], roundings=1)


def abstract(case):
    """The arrays of a shape without their values, and a function that runs the kernel on them."""
    _, terms = operands(shape(8, 8))
    static = {"causal": case.causal, "window": case.window}
    static |= {"scale": case.head_dim**-0.5, "softcap": case.softcap}

    def draw():
        args, terms = operands(case)
        return args, {name: x for name, x in terms.items() if isinstance(x, jax.Array)}

    def run(args, arrays, **options):
        return attention(*args, **arrays, **static, implementation="mosaic_gpu", **options)

    assert terms.keys() >= static.keys()
    return jax.eval_shape(draw), run


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)
