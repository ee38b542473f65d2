"""What measured ceilings change of a group's seconds: attention, tiles, weights, functions."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.attention import attention
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gemm import gated_gemm, gemm, gemm_for_norm, normed_gemm
from pallas_kernels.norm import rms_norm
from pbjax.device import ResourceClass, find_device
from pbjax.graph.classify import classify
from pbjax.graph.trace import trace
from pbjax.roofline.report import roofline_report

DATASHEET = find_device("NVIDIA H200")
MEASURED = replace(
    DATASHEET,
    tensor_flops_per_s={"bfloat16": 700e12},
    attention_flops_per_s={64: 350e12, 128: 500e12},
    functions_per_s={"tanh": 1e12},
    weight_bytes_per_s=4e12,
    launch_s=2e-6,
)
OURS = replace(MEASURED, pallas_launch_s=5e-6)
H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))


def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def kernel_point(function, *shapes, device=MEASURED, **options):
    with use_abstract_mesh(H200):
        report = roofline_report(function, *shapes, device=device, **options)
    return max(report.points, key=lambda point: point.seconds)


def heads(width, tokens=1024):
    return (of(4, tokens, 8, width),) * 3


def _plain(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.parametrize(("width", "rate"), [(64, 350e12), (128, 500e12), (112, 500e12)])
def test_attention_has_the_rate_of_the_nearest_head(width, rate):
    point = kernel_point(lambda q, k, v: attention(q, k, v), *heads(width))
    assert point.kind == "attention"
    assert point.tensor_s == pytest.approx(4 * 4 * 8 * 1024**2 * width / rate, rel=0.05)


def test_a_causal_kernel_computes_half_of_the_scores_and_the_diagonal():
    whole = kernel_point(lambda q, k, v: attention(q, k, v), *heads(128))
    half = kernel_point(lambda q, k, v: attention(q, k, v, causal=True), *heads(128))
    assert half.flops == pytest.approx(whole.flops, rel=0.05)
    # Of 8 tiles of keys a tile of queries meets 4.5, and pays one more.
    assert half.tensor_s / whole.tensor_s == pytest.approx((4.5 + 1) / (8 + 1), rel=0.01)


@pytest.mark.parametrize(("tokens", "seconds"), [(256, 2 * 3 / 9), (1024, 8), (4096, 32 * 33 / 9)])
def test_a_tile_of_queries_costs_one_tile_of_keys_more(tokens, seconds):
    """Against the tiles of queries times those of keys that take what was measured at 1,024."""
    point = kernel_point(lambda q, k, v: attention(q, k, v), *heads(128, tokens))
    tile_s = 4 * 4 * 8 * 1024**2 * 128 / 500e12 / 8
    assert point.tensor_s == pytest.approx(tile_s * seconds, rel=0.03)
    plain = roofline_report(_plain, *heads(128, tokens), device=MEASURED)
    (written_out,) = [point for point in plain.points if point.kind == "attention"]
    assert written_out.tensor_s == pytest.approx(tile_s * seconds, rel=0.03)


def test_a_ragged_length_is_computed_in_whole_tiles():
    whole = kernel_point(lambda q, k, v: attention(q, k, v), *heads(128, 256))
    ragged = kernel_point(lambda q, k, v: attention(q, k, v), *heads(128, 200))
    assert ragged.tensor_s == pytest.approx(whole.tensor_s, rel=0.05)


def test_attention_written_out_has_that_rate_too_and_its_softmax_in_it():
    report = roofline_report(_plain, *heads(64), device=MEASURED)
    (point,) = [point for point in report.points if point.kind == "attention"]
    assert point.cuda_s == 0
    assert point.tensor_s == pytest.approx(4 * 4 * 8 * 1024**2 * 64 / 350e12, rel=0.01)
    unfused = roofline_report(_plain, *heads(64), device=MEASURED, attention="unfused")
    assert max(p.cuda_s for p in unfused.points) > 0


def test_few_tiles_leave_some_of_the_device_idle():
    shapes = of(384, 14336), of(14336, 4096)
    measured = kernel_point(lambda x, w: gemm(x, w), *shapes, weights=(1,))
    datasheet = kernel_point(lambda x, w: gemm(x, w), *shapes, device=DATASHEET, weights=(1,))
    assert measured.seconds > 1.3 * max(measured.tensor_s, measured.memory_s)
    assert datasheet.seconds == max(datasheet.tensor_s, datasheet.memory_s)
    assert measured.resource == datasheet.resource == ResourceClass.TENSOR
    large = kernel_point(lambda x, w: gemm(x, w), of(8192, 8192), of(8192, 8192), weights=(1,))
    assert large.tensor_s == pytest.approx(2 * 8192**3 / 700e12, rel=0.01)


def test_weights_are_read_at_their_own_rate_and_every_kernel_is_launched():
    point = kernel_point(lambda x, w: x @ w, of(1, 4096), of(4096, 4096), weights=(1,))
    assert point.memory_s == pytest.approx(2 * (4096**2 + 2 * 4096) / 4e12)
    assert point.launch_s == 2e-6
    assert point.seconds == point.memory_s + point.launch_s


def test_a_chain_is_one_launch():
    report = roofline_report(lambda x: jnp.sin(x) * 2 + 1, of(1024), device=MEASURED)
    assert sum(point.launch_s for point in report.points) == 2e-6


def test_what_is_written_in_place_is_a_launch_of_its_own():
    def turned(x, keys, values):
        y = jnp.sin(x) * 2
        update = jax.lax.dynamic_update_slice
        return y, update(keys, jnp.cos(x), (0, 0)), update(values, jnp.tanh(x), (0, 0))

    shapes = of(1, 64), of(32, 64), of(32, 64)
    report = roofline_report(turned, *shapes, device=MEASURED, cache=(1, 2))
    assert sum(point.launch_s for point in report.points) == pytest.approx(3 * 2e-6)


@pytest.mark.parametrize(("rows", "kernels"), [(32, 2), (128, 2), (512, None)])
def test_xla_computes_few_rows_and_what_follows_apart(rows, kernels):
    shapes = of(rows, 4096), of(4096, 4096), of(rows, 4096)
    point = kernel_point(lambda x, w, r: gemm(x, w, residual=r), *shapes, device=OURS, weights=(1,))
    if kernels:
        assert point.launch_s == pytest.approx(kernels * 2e-6)
    else:  # One of ours, and its tiles.
        assert point.launch_s >= 5e-6


@pytest.mark.parametrize("rows", [32, 128, 512])
def test_products_with_folded_norms_take_what_those_without_do(rows):
    def seconds(function, *shapes):
        return kernel_point(function, *shapes, device=OURS, weights=(1,)).seconds

    x, w, scale = of(rows, 4096), of(4096, 4096), of(rows, dtype=jnp.float32)
    normed = seconds(lambda x, w, s: normed_gemm(x, s, w, activation="silu"), x, w, scale)
    plain = seconds(lambda x, w: gemm(x, w, activation="silu"), x, w)
    assert normed == pytest.approx(plain, rel=0.02)
    gated = seconds(lambda x, w, s: normed_gemm(x, s, w, w_gate=w, activation="silu"), x, w, scale)
    assert gated == pytest.approx(seconds(lambda x, w: gated_gemm(x, w, w), x, w), rel=0.02)
    options = {"eps": 1e-5, "centred": False}
    after = seconds(lambda x, w, r: gemm_for_norm(x, w, residual=r, **options).values, x, w, x)
    plain = seconds(lambda x, w, r: gemm(x, w, residual=r), x, w, x)
    factors = 2e-6 if rows < 512 else 0.0  # XLA makes them by a kernel of its own.
    assert after == pytest.approx(plain + factors, rel=0.02)


@pytest.mark.parametrize(("rows", "joining"), [(4, 3), (33, 0)])
def test_split_caches_are_joined(rows, joining):
    cache = of(rows, 1024, 8, 128)
    shapes = of(rows, 1, 32, 128), cache, cache, of(rows, dtype=jnp.int32)
    point = kernel_point(
        lambda q, k, v, lengths: decode_attention(q, k, v, lengths),
        *shapes,
        device=OURS,
        cache=(1, 2),
    )
    assert point.launch_s == pytest.approx(5e-6 + joining * 2e-6)


def test_a_norm_of_ours_is_launched_at_its_own_price():
    shapes = of(4, 4096), of(4096)
    norm = kernel_point(lambda x, w: rms_norm(x, w, eps=1e-5), *shapes, device=OURS, weights=(1,))
    assert norm.launch_s == 5e-6
    other = kernel_point(lambda x, w: rms_norm(x, w, eps=1e-5), *shapes, weights=(1,))
    assert other.launch_s == 2e-6


def test_a_function_is_charged_at_its_measured_rate():
    graph = trace(lambda params, x: (jnp.tanh(x), jnp.exp(x)), (), of(1 << 20))
    tanh, exp = classify(graph, MEASURED)
    assert tanh.compute_s == pytest.approx((1 << 20) / 1e12)
    assert tanh.resource == ResourceClass.CUDA
    fast = replace(MEASURED, functions_per_s={"tanh": 1e13})
    assert classify(graph, fast)[0].resource == ResourceClass.MEMORY
    assert exp.compute_s == classify(graph, DATASHEET)[1].compute_s
