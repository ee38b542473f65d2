"""A GEMM beside bandwidth-bound work: one launch against the two in sequence on all SMs."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import corun
from pallas_kernels.corun import reference as corun_reference
from pallas_kernels.corun.shapes import (
    ATTENTION_PAIRS,
    DECODE_LAYERS,
    RAGGED,
    SHAPES,
    AttentionPairShape,
    CorunShape,
    DecodeLayerShape,
)
from pallas_kernels.decode_attention import decode_attention, decode_attention_reference
from pallas_kernels.dispatch import HOPPER_SMS
from pallas_kernels.gemm import gated_gemm, gemm
from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.activations import GELU_ERROR
from pallas_kernels.norm import add_layer_norm
from pallas_kernels.norm import reference as norm_reference

from . import Case

EPS = 1e-5


def cases() -> list[Case]:
    """Every pair and layer on all SMs; ragged pairs on few, in both dtypes."""
    found = [_case(shape, "bfloat16", None) for shape in SHAPES]
    found += [_layer_case(shape) for shape in DECODE_LAYERS]
    for dtype in ("bfloat16", "float16"):
        found += [_case(shape, dtype, 6) for shape in RAGGED]
        found += [_attention_case(shape, dtype, 6) for shape in ATTENTION_PAIRS]
    return found


def _case(shape: CorunShape, dtype: str, sm_budget: int | None) -> Case:
    on_gpu = {"implementation": "mosaic_gpu", "sm_budget": sm_budget}
    activation, sums = shape.activation, shape.partner == "sums"

    def together(x, w, *partner):
        if sums:
            return corun.gemm_beside_sums(x, w, *partner, activation=activation, **on_gpu)
        return corun.gemm_beside_norm(
            x, w, *partner, eps=EPS, centred=True, activation=activation, **on_gpu
        )

    def in_sequence(product, x, w, *partner):
        y = gemm(x, w, activation=activation, implementation=product)
        if sums:
            return y, corun.column_sums(*partner, implementation="mosaic_gpu")
        return y, add_layer_norm(*partner, eps=EPS, implementation="mosaic_gpu")

    def truth(x, w, *partner):
        y = gemm_reference.gemm(x, w, activation=activation)
        if sums:
            return corun.GemmBesideSums(y, corun_reference.column_sums(*partner))
        total = norm_reference.add(*partner[:2])
        normed = norm_reference.layer_norm(total, *partner[2:], eps=EPS)
        return corun.GemmBesideNorm(y, normed, total)

    product = {"reduction": shape.k, "function_error": GELU_ERROR}
    partner = (
        ({"reduction": shape.rows},) if sums else ({"reduction": shape.width}, {"reduction": 1})
    )
    moved = shape.m * (shape.k + shape.n) + shape.k * shape.n
    moved += shape.rows * shape.width * (1 if sums else 4)
    return Case(
        kernel="corun",
        name=shape.name,
        dtype=dtype,
        make=functools.partial(_make, shape, dtype),
        run=together,
        reference=truth,
        close=(product, *partner),
        opponents={}
        if sm_budget
        else {
            "in sequence, cublaslt": functools.partial(in_sequence, "xla"),
            "in sequence, our gemm": functools.partial(in_sequence, "mosaic_gpu"),
        },
        flops=2 * shape.m * shape.k * shape.n,
        num_bytes=2 * moved,
        sustained=True,
    )


def _make(shape: CorunShape, dtype, key):
    shapes = [(shape.m, shape.k), (shape.k, shape.n), (shape.rows, shape.width)]
    scales = [1.0, shape.k**-0.5, 1.0]
    if shape.partner == "norm":
        shapes += [(shape.rows, shape.width), (shape.width,), (shape.width,)]
        scales += [1.0, 1.0, 1.0]
    keys = jax.random.split(key, len(shapes))
    return tuple(
        (jax.random.normal(k, s, jnp.bfloat16) * scale).astype(dtype)
        for k, s, scale in zip(keys, shapes, scales, strict=True)
    )


def _attention_case(shape: AttentionPairShape, dtype: str, sm_budget: int) -> Case:
    """A GEMM beside a part of the attention; everything that both take."""
    attention = shape.attention
    rows = slice(shape.first_sequence, shape.first_sequence + shape.num_sequences)
    last = ["w_gate"] if shape.gated else ["bias", "residual"]
    last += ["alibi_slopes"] * attention.alibi

    def run(x, w, q, k, v, lengths, *rest):
        return corun.gemm_beside_decode_attention(
            x,
            w,
            q[rows],
            k,
            v,
            lengths[rows],
            first_sequence=shape.first_sequence,
            activation="silu",
            sm_budget=sm_budget,
            implementation="mosaic_gpu",
            **dict(zip(last, rest, strict=True)),
        )

    def truth(x, w, q, k, v, lengths, *rest):
        given = dict(zip(last, rest, strict=True))
        terms = {"alibi_slopes": given.pop("alibi_slopes", None)}
        if shape.gated:
            product = gemm_reference.gated_gemm(x, given["w_gate"], w)
        else:
            product = gemm_reference.gemm(x, w, **given, activation="silu")
        attended = decode_attention_reference(
            q, k, v, lengths, scale=attention.head_dim**-0.5, **terms
        )
        return corun.GemmBesideDecodeAttention(product, attended[rows])

    return Case(
        kernel="corun",
        name=f"attention: {shape.name}",
        dtype=dtype,
        make=functools.partial(_make_attention, shape, dtype),
        run=run,
        reference=truth,
        close=(
            {"reduction": shape.k, "function_error": GELU_ERROR},
            {"reduction": attention.num_keys, "roundings": 1},
        ),
        flops=2 * shape.m * shape.k * shape.n * (1 + shape.gated),
        num_bytes=attention.cache_bytes,
    )


def _make_attention(shape: AttentionPairShape, dtype, key):
    attention, keys = shape.attention, iter(jax.random.split(key, 9))

    def draw(*size, scale=1.0):
        return (jax.random.normal(next(keys), size, jnp.bfloat16) * scale).astype(dtype)

    b, heads, h = attention.batch_size, attention.num_heads, attention.head_dim
    cache = (b, attention.num_keys, attention.num_kv_heads, h)
    x, w = draw(shape.m, shape.k), draw(shape.k, shape.n, scale=shape.k**-0.5)
    q, k, v = draw(b, attention.num_tokens, heads, h), draw(*cache), draw(*cache)
    lengths = jax.random.randint(next(keys), (b,), 0, attention.num_keys + 1)
    if shape.gated:
        last = [draw(shape.k, shape.n, scale=shape.k**-0.5)]
    else:
        last = [draw(shape.n), draw(shape.m, shape.n)]
    slopes = 2.0 ** (-8 * (jnp.arange(heads, dtype=jnp.float32) + 1) / heads)
    return (x, w, q, k, v, lengths, *last, *([slopes] if attention.alibi else []))


def _layer_case(shape: DecodeLayerShape) -> Case:
    """The GEMMs of one half beside the attention of the other, and the reverse: 8 launches."""
    half, parts = shape.batch_size // 2, shape.parts(HOPPER_SMS)
    on_gpu = {"implementation": "mosaic_gpu"}

    def operands(xs, ws, rows):
        """x, w and options of each GEMM."""
        x, attended, hidden = (a[rows] for a in xs)
        return {
            "qkv": (x, ws["qkv"], {}),
            "out": (attended, ws["out"], {"residual": x}),
            "up": (x, ws["up"], {"w_gate": ws["gate"], "activation": "silu"}),
            "down": (hidden, ws["down"], {"residual": x}),
        }

    def product(x, w, implementation, w_gate=None, **options):
        if w_gate is None:
            return gemm(x, w, **options, implementation=implementation)
        return gated_gemm(x, w_gate, w, **options, implementation=implementation)

    def together(xs, ws, q, k, v, lengths):
        results = []
        for start in (0, half):
            other, attended = half - start, []
            for name, (x, w, options) in operands(xs, ws, slice(start, start + half)).items():
                first, count = other + parts[name][0], parts[name][1]
                if not count:
                    results.append(product(x, w, "mosaic_gpu", **options))
                    continue
                rows = slice(first, first + count)
                both = corun.gemm_beside_decode_attention(
                    x, w, q[rows], k, v, lengths[rows], first_sequence=first, **options, **on_gpu
                )
                results.append(both.product)
                attended.append(both.attended)
            results.append(jnp.concatenate(attended))
        return results

    def in_sequence(attend, implementation, sizes, xs, ws, q, k, v, lengths):
        results = []
        for start in range(0, shape.batch_size, sizes):
            rows = slice(start, start + sizes)
            results.append(attend(q[rows], k, v, lengths[rows], start))
            for x, w, options in operands(xs, ws, rows).values():
                results.append(product(x, w, implementation, **options))
        return results

    def ours(q, k, v, lengths, first):
        return decode_attention(q, k, v, lengths, first_sequence=first, **on_gpu)

    def cudnn(q, k, v, lengths, first):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            query_seq_lengths=jnp.ones_like(lengths),
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )

    def truth(xs, ws, q, k, v, lengths):
        def attend(one):
            alone = {name: x[None] for name, x in one.items()}
            return decode_attention_reference(**alone, scale=shape.head_dim**-0.5)[0]

        attended = jax.lax.map(attend, {"q": q, "k": k, "v": v, "lengths": lengths})
        results = []
        for start in (0, half):
            for x, w, options in operands(xs, ws, slice(start, start + half)).values():
                if "w_gate" in options:
                    results.append(gemm_reference.gated_gemm(x, options["w_gate"], w))
                else:
                    results.append(gemm_reference.gemm(x, w, **options))
            other = half - start
            results.append(attended[other : other + half])
        return results

    close = [{"reduction": k} for k, _ in shape.products.values()]
    close.append({"reduction": shape.num_keys, "roundings": 1})
    weights = sum(k * n * (2 if name == "up" else 1) for name, (k, n) in shape.products.items())
    cache = 2 * shape.batch_size * shape.num_keys * shape.num_kv_heads * shape.head_dim
    in_halves = functools.partial(in_sequence, ours, "mosaic_gpu", half)
    return Case(
        kernel="corun",
        name=f"decode layer: {shape.name}",
        dtype="bfloat16",
        make=functools.partial(_make_layer, shape),
        run=together,
        reference=truth,
        close=(*close, *close),
        opponents={
            "whole batch, ours": functools.partial(
                in_sequence, ours, "mosaic_gpu", shape.batch_size
            ),
            "whole batch, cudnn, cublaslt": functools.partial(
                in_sequence, cudnn, "xla", shape.batch_size
            ),
            "halves, ours": in_halves,
        },
        flops=2 * shape.batch_size * weights,
        num_bytes=2 * (weights + cache),
        sustained=True,
    )


def _make_layer(shape: DecodeLayerShape, key):
    keys = iter(jax.random.split(key, 12))

    def draw(*size, scale=1.0):
        return jax.random.normal(next(keys), size, jnp.bfloat16) * scale

    b, d, heads = shape.batch_size, shape.embed_dim, shape.num_heads * shape.head_dim
    xs = [draw(b, d), draw(b, heads), draw(b, shape.mlp_dim)]
    ws = {name: draw(k, n, scale=k**-0.5) for name, (k, n) in shape.products.items()}
    ws["gate"] = draw(d, shape.mlp_dim, scale=d**-0.5)
    cache = (b, shape.num_keys, shape.num_kv_heads, shape.head_dim)
    q, k, v = draw(b, 1, shape.num_heads, shape.head_dim), draw(*cache), draw(*cache)
    return xs, ws, q, k, v, jnp.full(b, shape.num_keys, jnp.int32)
