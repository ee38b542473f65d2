"""Closed forms against what traced models count, and what they say of batch and length."""

import math
from functools import cache

import pytest

from models.presets import find_shape
from pbjax.device import find_device
from pbjax.roofline.points import Total
from pbjax.roofline.report import roofline_report
from tests.closed_forms import (
    critical_rows,
    decode_attention_intensity,
    dense_intensity,
    kv_cache_bytes,
    output_projection_intensity,
    prefill_attention_intensity,
    unfused_attention_intensity,
)
from tests.shapes import few_layers

H200 = find_device("NVIDIA H200")


def shape():
    return few_layers("llama3.2-1b")


@cache
def counted(phase, batch, seq, attention="fused"):
    call = shape().call(phase, batch, seq)
    return roofline_report(
        call.function, *call.inputs, device=H200, cache=call.cache, attention=attention
    )


def points(report, *names):
    return [p for p in report.points if p.name in names]


def intensity(report, name):
    return Total(name=name, points=tuple(points(report, name))).intensity


@pytest.mark.parametrize(("phase", "batch", "seq"), [("prefill", 4, 256), ("decode", 32, 256)])
@pytest.mark.parametrize("layer", ["query", "key", "value", "output", "gate", "up", "down"])
def test_dense_layers(layer, phase, batch, seq):
    config = shape().config
    width, heads = config.embed_dim, config.num_kv_heads * config.head_dim
    sizes = {
        "query": (width, width),
        "key": (width, heads),
        "value": (width, heads),
        "output": (width, width),
        "gate": (width, config.mlp_dim),
        "up": (width, config.mlp_dim),
        "down": (config.mlp_dim, width),
    }
    rows = batch * seq if phase == "prefill" else batch
    found = intensity(counted(phase, batch, seq), layer)
    assert found == pytest.approx(dense_intensity(rows, *sizes[layer]), rel=1e-9)
    if layer == "output":
        assert found == pytest.approx(output_projection_intensity(rows, width), rel=1e-9)


def group(config):
    return config.num_heads // config.num_kv_heads


def without_softmax(report, flops):
    """FLOPs of the two products over the bytes of the whole attention."""
    found = [p for p in report.points if p.kind == "attention"]
    products = sum(p.flops for p in found)
    assert flops <= products <= 1.05 * flops
    return flops / sum(p.traffic.total for p in found)


@pytest.mark.parametrize("seq", [128, 512])
def test_prefill_attention(seq):
    config, batch = shape().config, 4
    flops = 4 * batch * seq**2 * config.embed_dim * config.num_layers
    found = without_softmax(counted("prefill", batch, seq), flops)
    assert found == pytest.approx(prefill_attention_intensity(seq, group(config)), rel=1e-3)
    scores = without_softmax(counted("prefill", batch, seq, "unfused"), flops)
    expected = unfused_attention_intensity(seq, config.head_dim, group(config))
    assert scores == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("seq", [128, 2048])
def test_decode_attention(seq):
    config, batch = shape().config, 4
    flops = 4 * batch * seq * config.embed_dim * config.num_layers
    found = without_softmax(counted("decode", batch, seq), flops)
    assert found == pytest.approx(decode_attention_intensity(seq, group(config)), rel=1e-3)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_attention_does_not_depend_on_the_batch(phase):
    few, many = (
        Total(name="", points=tuple(p for p in r.points if p.kind == "attention")).intensity
        for r in (counted(phase, 4, 512), counted(phase, 64, 512))
    )
    assert few == pytest.approx(many, rel=1e-3)


def test_dense_grows_with_tokens_in_prefill_and_with_rows_in_decode():
    small = counted("prefill", 1, 16), counted("decode", 4, 512)
    longer = counted("prefill", 1, 32), counted("decode", 4, 1024)
    wider = counted("prefill", 2, 16), counted("decode", 8, 512)
    at = [[intensity(r, "up") for r in reports] for reports in (small, longer, wider)]
    assert at[1][0] / at[0][0] == pytest.approx(2, rel=0.03)
    assert at[2][0] == pytest.approx(at[1][0])
    assert at[1][1] == at[0][1]
    assert at[2][1] / at[0][1] == pytest.approx(2, rel=0.03)


def test_limits_of_the_closed_forms():
    assert dense_intensity(1, 10**6, 10**6) == pytest.approx(1, rel=1e-5)
    assert dense_intensity(10**9, 4096, 4096) == pytest.approx(4096 / 2, rel=1e-4)
    assert decode_attention_intensity(10**9, 1) == pytest.approx(1)
    assert decode_attention_intensity(10**9, 4) == pytest.approx(4)
    assert unfused_attention_intensity(10**9, 128) == pytest.approx(4 * 128 / 12)
    assert decode_attention_intensity(10**9, 16) < H200.ridge_point("bfloat16")


@pytest.mark.parametrize("sizes", [(4096, 4096), (4096, 14336), (2048, 512)])
def test_critical_rows_meet_the_ridge(sizes):
    ridge = H200.ridge_point("bfloat16")
    rows = critical_rows(ridge, *sizes)
    assert dense_intensity(rows, *sizes) == pytest.approx(ridge)
    assert rows > ridge


def test_a_narrow_layer_never_meets_the_ridge():
    assert critical_rows(206.0, 128, 128) == math.inf
    assert dense_intensity(10**12, 128, 128) < 206


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [("llama3-8b", 131_072), ("gpt2-xl", 307_200), ("bloom-7b1", 491_520)],
)
def test_kv_cache_of_known_models(name, bytes_per_token):
    config = find_shape(name).config
    heads = getattr(config, "num_kv_heads", config.num_heads)
    head_dim = config.embed_dim // config.num_heads
    assert kv_cache_bytes(config.num_layers, heads, head_dim, 1) == bytes_per_token


def test_kv_cache_is_what_the_model_keeps():
    config = shape().config
    sizes = config.num_layers, config.num_kv_heads, config.head_dim
    lengths = 4 * 8
    found = counted("decode", 8, 512).memory.kv_cache_bytes
    assert found == kv_cache_bytes(*sizes, 8 * 512) + lengths
