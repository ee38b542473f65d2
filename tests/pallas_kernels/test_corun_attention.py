"""Decode attention beside a GEMM: interpreter with races, lowering, SASS, bad input."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import corun
from pallas_kernels.corun import mosaic_gpu, pairs
from pallas_kernels.corun.shapes import ATTENTION_PAIRS, DECODE_LAYERS, AttentionPairShape
from pallas_kernels.corun.tiles import tile_beside
from pallas_kernels.decode_attention import decode_attention_reference
from pallas_kernels.decode_attention.shapes import DecodeShape
from pallas_kernels.gemm import mosaic_gpu as gemm_kernel
from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.activations import GELU_ERROR
from pallas_kernels.testing import assert_close
from tests.cases import long_but
from tests.kernel_layers import assert_clean, has_cuda_plugin, interpreted, lowered, ptxas_reports


def launches():
    """Every launch of the layers, and every pair, for compilation ahead of time."""
    found = {pair.name: (attention_call(pair), attention_specs(pair)) for pair in ATTENTION_PAIRS}
    for layer in DECODE_LAYERS:
        found |= layer_launches(layer)
    return found


def layer_launches(layer):
    """The four launches of a half, each with its part of the other's attention."""
    half, found = layer.batch_size // 2, {}
    parts = layer.parts(132)
    for name, (k, n) in layer.products.items():
        first, count = parts[name]
        pair = AttentionPairShape(
            name=f"{layer.name} {name}",
            m=half,
            k=k,
            n=n,
            attention=DecodeShape(
                name="",
                batch_size=layer.batch_size,
                num_keys=layer.num_keys,
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
            ),
            first_sequence=half + first,
            num_sequences=count,
            gated=name == "up",
        )
        found[pair.name] = attention_call(pair), attention_specs(pair)
    return found


def attention_specs(pair: AttentionPairShape, dtype=jnp.bfloat16):
    a, b = pair.attention, pair.num_sequences
    cache = (a.batch_size, a.num_keys, a.num_kv_heads, a.head_dim)
    sizes = [(pair.m, pair.k), (pair.k, pair.n), (b, a.num_tokens, a.num_heads, a.head_dim)]
    sizes += [cache, cache]
    last = [(pair.k, pair.n)] if pair.gated else [(pair.n,), (pair.m, pair.n)]
    specs = [jax.ShapeDtypeStruct(size, dtype) for size in sizes + last]
    if a.alibi:
        specs.append(jax.ShapeDtypeStruct((a.num_heads,), jnp.float32))
    return [*specs[:5], jax.ShapeDtypeStruct((b,), jnp.int32), *specs[5:]]


def attention_inputs(pair: AttentionPairShape, lengths, dtype=jnp.bfloat16):
    specs = attention_specs(pair, dtype)
    keys = jax.random.split(jax.random.key(pair.m), len(specs))
    inputs = [
        (jax.random.normal(k, s.shape, jnp.float32) * (0.2 if s.shape == (pair.k, pair.n) else 1))
        for k, s in zip(keys, specs, strict=True)
    ]
    inputs = [x.astype(s.dtype) for x, s in zip(inputs, specs, strict=True)]
    inputs[5] = jnp.array(lengths, jnp.int32)
    return [*inputs[:-1], jnp.abs(inputs[-1])] if pair.attention.alibi else inputs


def options_of(pair: AttentionPairShape, rest):
    names = ["w_gate"] if pair.gated else ["bias", "residual"]
    return dict(zip([*names, *["alibi_slopes"] * pair.attention.alibi], rest, strict=True))


def attention_call(pair: AttentionPairShape, implementation="mosaic_gpu", **options):
    options |= {"first_sequence": pair.first_sequence, "implementation": implementation}

    def run(x, w, q, k, v, lengths, *rest):
        return corun.gemm_beside_decode_attention(
            x, w, q, k, v, lengths, **options_of(pair, rest), activation="silu", **options
        )

    return run


def attention_truth(pair: AttentionPairShape, x, w, q, k, v, lengths, *rest):
    given = options_of(pair, rest)
    slopes = given.pop("alibi_slopes", None)
    rows = slice(pair.first_sequence, pair.first_sequence + pair.num_sequences)
    attended = decode_attention_reference(
        q, k[rows], v[rows], lengths, scale=q.shape[-1] ** -0.5, alibi_slopes=slopes
    )
    if pair.gated:
        return gemm_reference.gated_gemm(x, given["w_gate"], w), attended
    return gemm_reference.gemm(x, w, **given, activation="silu"), attended


def attention_pair(m=264, *, gated=False, first_sequence=0, **attention) -> AttentionPairShape:
    given = {"num_keys": 136, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128} | attention
    return AttentionPairShape(
        name="",
        m=m,
        k=128,
        n=192,
        attention=DecodeShape(name="", batch_size=6, **given),
        first_sequence=first_sequence,
        num_sequences=5,
        gated=gated,
    )


LENGTHS = [130, 0, 136, 3, 70]
ATTENTION_INTERPRETED = {  # The pair, and the slots of its ring.
    "grouped heads, an item without keys": (attention_pair(first_sequence=1), 3),
    "gated, a ring of even size": (attention_pair(gated=True, num_kv_heads=1), 4),
    "alibi, two tokens, tiles of 128": (
        attention_pair(num_heads=4, num_kv_heads=4, head_dim=64, alibi=True, num_tokens=2),
        2,
    ),
}


@pytest.mark.parametrize("name", long_but(ATTENTION_INTERPRETED))
def test_attention_beside_a_gemm_is_right_and_free_of_races(name):
    pair, depth = ATTENTION_INTERPRETED[name]
    inputs = attention_inputs(pair, LENGTHS)

    def run(x, w, q, k, v, lengths, *rest):
        given = options_of(pair, rest)
        tile = tile_beside(pair.m, pair.n, pair.k, gated=pair.gated, ctas=3)
        partner = mosaic_gpu.decode_partner(
            q,
            k,
            v,
            lengths,
            given.get("alibi_slopes"),
            first_sequence=pair.first_sequence,
            scale=q.shape[-1] ** -0.5,
            tile=tile,
            depth=depth,
            emulated=True,
        )
        weights = (given["w_gate"], w) if pair.gated else (w,)
        epilogue = gemm_kernel.Epilogue(activation="silu", gated=pair.gated)
        product, folded = mosaic_gpu.gemm_beside(
            x,
            weights,
            given.get("bias"),
            given.get("residual"),
            partner,
            epilogue=epilogue,
            ctas=3,
            tile=tile,
        )
        return product, mosaic_gpu.unfold(folded, q.shape[1])

    product, attended = interpreted(run, *inputs)
    wanted = attention_truth(pair, *inputs)
    assert_close(product, wanted[0], reduction=pair.k, function_error=GELU_ERROR)
    assert_close(attended, wanted[1], reduction=pair.attention.num_keys, roundings=1)


@pytest.mark.parametrize("name", long_but(ATTENTION_INTERPRETED))
def test_without_a_gpu_xla_runs_the_attention_after_the_gemm(name):
    pair, _ = ATTENTION_INTERPRETED[name]
    inputs = attention_inputs(pair, LENGTHS, jnp.float32)
    product, attended = attention_call(pair, None)(*inputs)
    wanted = attention_truth(pair, *inputs)
    assert_close(product, wanted[0], reduction=pair.k, function_error=GELU_ERROR)
    assert_close(attended, wanted[1], reduction=pair.attention.num_keys * 128)


@pytest.mark.long
@pytest.mark.parametrize("layer", DECODE_LAYERS, ids=lambda layer: layer.name)
def test_each_product_of_a_layer_lowers_to_one_launch_with_its_attention(layer):
    for function, specs in layer_launches(layer).values():
        text = lowered(function, *specs)
        assert text.count("@mosaic_gpu_v2") == 1
        assert "pbjax_gemm_beside_decode_attention" in text


@pytest.mark.parametrize("layer", DECODE_LAYERS, ids=lambda layer: layer.name)
def test_the_parts_of_a_layer_are_the_other_half(layer):
    following = 0
    for first, count in layer.parts(132).values():
        assert first == following
        assert count % 16 == 0
        following += count
    assert following == layer.batch_size // 2


def test_what_one_launch_cannot_do_runs_as_two_kernels():
    """Nine query rows a key-value head are more than the columns of the product."""
    pair = attention_pair(num_heads=9, num_kv_heads=1)
    specs = attention_specs(pair)
    with pytest.raises(NotImplementedError, match="9 query rows"):
        lowered(attention_call(pair), *specs)
    text = lowered(attention_call(pair, None), *specs)
    assert text.count("@mosaic_gpu_v2") == 2


def test_an_interleaved_pair_is_one_launch():
    def run(x, w, q, k, v, lengths):
        compute = {"x": x, "w": w, "bias": None, "residual": None, "activation": None, "scale": 1.0}
        memory = {"q": q, "k": k, "v": v, "lengths": lengths, "scale": 0.125, "first_sequence": 1}
        memory |= {"page_table": None, "alibi_slopes": None, "softcap": None}
        return pairs.beside(
            pairs.Call(name="gemm", arguments=compute),
            pairs.Call(name="decode_attention", arguments=memory),
            2,
            3,
        )

    text = lowered(run, *attention_specs(attention_pair())[:6])
    assert text.count("@mosaic_gpu_v2") == 1
    assert "pbjax_gemm_beside_decode_attention" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 80}, "head size is 80"),
        ({"num_keys": 100}, "a cache of 100 keys"),
        ({"num_heads": 32}, "16 query rows"),
    ],
)
def test_attention_that_does_not_fit_is_refused(changes, message):
    pair = attention_pair(**changes)
    with pytest.raises(NotImplementedError, match=message):
        lowered(attention_call(pair), *attention_specs(pair))


def test_attention_in_f32_is_refused():
    pair = attention_pair()
    specs = attention_specs(pair)
    specs[2:5] = [jax.ShapeDtypeStruct(s.shape, jnp.float32) for s in specs[2:5]]
    with pytest.raises(NotImplementedError, match="dtype of q"):
        lowered(attention_call(pair), *specs)


@pytest.mark.parametrize("scale", [-1.0, 0.0, float("nan")])
def test_a_factor_of_the_scores_that_is_not_positive_is_refused(scale):
    pair = attention_pair()
    with pytest.raises(ValueError, match=f"scale={scale}"):
        lowered(attention_call(pair, attention_scale=scale), *attention_specs(pair))


def test_a_gated_product_with_a_bias_is_refused():
    pair = attention_pair(gated=True)
    inputs = attention_inputs(pair, LENGTHS)
    with pytest.raises(ValueError, match="gated product has none"):
        attention_call(pair, bias=jnp.ones(pair.n, jnp.bfloat16))(*inputs)


@pytest.mark.long
@pytest.mark.skipif(not has_cuda_plugin(), reason="needs jax's CUDA plugin, no GPU")
def test_shipped_launches_neither_spill_nor_serialise():
    reports = ptxas_reports("corun_attention")
    assert set(reports) == set(launches())
    for report in reports.values():
        assert_clean(report)
