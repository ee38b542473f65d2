"""Fusion of attention: how scores, caps, masks and biases are written, and what is left alone."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from pallas_kernels.operation import PRIMITIVE
from pallas_kernels.testing import assert_close
from pbjax.fusion import listed, verify
from pbjax.graph.difference import difference
from tests.fusion_graphs import fused, kernels, run, traced
from tests.user_models import LENGTHS, PADDING, B, D, H, N, S, normal, tokens


def attend(q, k, v, change=lambda scores: scores, axis=-1):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    weights = jax.nn.softmax(change(scores), axis=axis)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


QKV = tuple(normal(i, B, S, N, H) for i in range(3))


def masked_by_score(q, k, v):
    return attend(q, k, v, lambda scores: jnp.where(scores > 0.1, scores, -1e9))


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((1, N, 1, S), "attention(bias)"), ((B, 1, 1, S), "attention(key_bias)")],
    ids=["heads", "sequences"],
)
def test_a_constant_band_over_heads_or_sequences_is_no_causal_mask(shape, kernel):
    rows = jnp.tril(jnp.ones((max(shape[:2]), S), bool)).reshape(shape)

    def model(q, k, v):
        return attend(q, k, v, lambda scores: jnp.where(rows, scores, -1e9))

    fusion = fused(model, *QKV)
    assert kernels(fusion) == {kernel: 1}
    (got,) = run(fusion.graph, (), QKV)
    assert_close(got, model(*QKV), reduction=S * H, roundings=4)


CAUSAL = jnp.tril(jnp.ones((S, S), bool))


def gemma2(q, k, v):
    """As Flax's Gemma has it: scaled queries, divided by the cap, masked last."""
    scores = jnp.einsum("btnh,bsnh->bnts", q * H**-0.5, k)
    scores = jnp.tanh(scores / 2.0) * 2.0
    scores = jnp.where(CAUSAL[None, None], scores, -2.3819763e38)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), v)


def capped_with_a_bias(q, k, v):
    """A bias and a padding mask that is data, after the cap."""
    bias = normal(7, 1, N, S, S)
    hidden = jnp.where(PADDING, 0.0, -1e9)[:, None, None]
    return attend(q, k, v, lambda scores: 2.0 * jnp.tanh(0.5 * scores) + bias + hidden)


def capped_in_narrow_steps(q, k, v):
    """Cap of another size than what scores are divided by, and a temperature after it."""

    def change(scores):
        wide = scores.astype(jnp.float32)
        return (3.0 * jnp.tanh(wide / 4.0)).astype(scores.dtype) / 1.5

    return attend(q, k, v, change)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        (gemma2, "attention(causal, softcap)"),
        (capped_with_a_bias, "attention(softcap, bias, key_bias)"),
        (capped_in_narrow_steps, "attention(softcap)"),
    ],
)
def test_a_cap_of_the_scores_is_found_however_it_is_written(model, kernel, dtype):
    given = [4.0 * x.astype(dtype) for x in QKV]
    narrow = lambda *given: model(*given).astype(dtype)  # noqa: E731
    fusion = fused(narrow, *given)
    assert kernels(fusion) == {kernel: 1}
    verify(fusion)
    (got,) = run(fusion.graph, (), given)
    want = model(*(x.astype(jnp.float32) for x in given))
    assert_close(got, want, reduction=S * H, roundings=8)


def test_a_capped_step_over_a_cache_is_decode_attention():
    def model(q, keys, values, lengths):
        scores = jnp.einsum("bnh,bsnh->bns", q, keys) * H**-0.5
        scores = 2.0 * jnp.tanh(scores / 2.0)
        seen = jnp.arange(S)[None, None] < lengths[:, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        return jnp.einsum("bns,bsnh->bnh", weights, values)

    given = (QKV[0][:, 0], *QKV[1:], LENGTHS)
    fusion = fused(model, *given)
    assert kernels(fusion) == {"decode_attention(lengths, softcap)": 1}
    verify(fusion)
    (got,) = run(fusion.graph, (), given)
    assert_close(got, model(*given), reduction=S * H, roundings=4)


ANY_KEYS = jnp.array([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("mask", [PADDING.astype(jnp.int32), ANY_KEYS], ids=["padding", "any"])
@pytest.mark.parametrize(
    "hide",
    [
        lambda scores, mask: jnp.where(mask[:, None, None] != 0, scores, -1e9),
        lambda scores, mask: scores + (1.0 - mask[:, None, None].astype(jnp.float32)) * -1e9,
        lambda scores, mask: scores + jnp.where(mask == 0, -3e38, 0.0)[:, None, None],
    ],
)
def test_a_mask_of_keys_that_is_data_is_a_number_for_each_key(hide, mask):
    """Exactly, whichever keys it hides; the keys of a sequence without any count alike."""

    def model(q, k, v, mask):
        return attend(q, k, v, lambda scores: hide(scores, mask))

    fusion = fused(model, *QKV, mask)
    assert kernels(fusion) == {"attention(key_bias)": 1}
    (attention,) = (o for o in fusion.graph.operations if o.primitive == PRIMITIVE)
    shapes = [fusion.graph.avals[a].shape for a in attention.inputs]
    assert (B, S) in shapes
    assert (B, N, S, S) not in shapes
    verify(fusion)
    (got,) = run(fusion.graph, (), (*QKV, mask))
    assert_close(got, model(*QKV, mask), reduction=S * H, roundings=4)


def test_a_mask_of_keys_joins_a_bias_that_is_whole_for_each_sequence_all_the_same():
    def model(q, k, v, bias, mask):
        hidden = jnp.where(mask, 0.0, -1e9)[:, None, None]
        return attend(q, k, v, lambda scores: scores + bias + hidden)

    given = (*QKV, normal(7, B, N, S, S), PADDING)
    fusion = fused(model, *given)
    assert kernels(fusion) == {"attention(bias)": 1}
    (got,) = run(fusion.graph, (), given)
    assert_close(got, model(*given), reduction=S * H, roundings=4)


def test_attention_whose_result_keeps_more_digits_is_left_alone_with_the_reason():
    def model(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) * H**-0.5
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v.astype(jnp.float32))

    given = [x.astype(jnp.bfloat16) for x in QKV]
    fusion = fused(model, *given)
    assert fusion.matches == ()
    (miss,) = fusion.misses
    assert miss.reason == "its result stays float32, which the kernel would round to bfloat16"
    assert fused(lambda *given: model(*given).astype(jnp.float16), *given).matches == ()
    fusion = fused(lambda *given: model(*given).reshape(B, S, -1).astype(jnp.bfloat16), *given)
    assert kernels(fusion) == {"attention": 1}
    verify(fusion)


def projected(x, change):
    q, k, v = (x @ normal(seed, D, D) for seed in (3, 4, 5))
    q, k, v = (change(y, i).reshape(B, S, N, H) for i, y in enumerate((q, k, v)))
    return attend(q, k, v)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda y, i: y, {"attention": 1}),
        (lambda y, i: y * 0.5 if i == 0 else y, {"attention": 1}),
        (lambda y, i: jnp.sin(y) if i < 2 else y, {"attention": 1, "gemm(3 joined)": 1}),
    ],
    ids=["alone", "scaled", "changed on the way"],
)
def test_products_that_attention_alone_reads_are_not_joined(change, found):
    assert kernels(fused(lambda x: projected(x, change), tokens())) == found


def over_queries(q, k, v):
    return attend(q, k, v, axis=2)


def returning_weights(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v), weights


def biased_before_the_cap(q, k, v):
    bias = normal(7, 1, N, S, S)
    return attend(q, k, v, lambda scores: 30.0 * jnp.tanh((scores + bias) / 30.0))


def masked_before_the_cap(q, k, v):
    causal = jnp.tril(jnp.ones((S, S), bool))
    return attend(q, k, v, lambda scores: jnp.tanh(jnp.where(causal, scores, -1e9)))


def capped_twice(q, k, v):
    return attend(q, k, v, lambda scores: 3.0 * jnp.tanh(2.0 * jnp.tanh(scores / 2.0) / 3.0))


def through_a_sine(q, k, v):
    return attend(q, k, v, jnp.sin)


def wide_values(q, k, v):
    return attend(q, k, jnp.concatenate([v, v], axis=-1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (biased_before_the_cap, "the scores go through tanh"),
        (masked_before_the_cap, "the scores go through tanh"),
        (capped_twice, "the scores go through tanh"),
        (through_a_sine, "the scores go through sin"),
        (masked_by_score, "the mask is a function of the scores, by gt"),
        (over_queries, "the softmax runs over another axis than the product with the values"),
        (returning_weights, "the result of its div .* is returned to the user"),
        (wide_values, "queries have heads of 8 features, values of 16"),
    ],
)
def test_attention_that_the_kernel_cannot_do_is_left_alone_with_the_reason(model, reason):
    graph, _ = traced(model, *QKV)
    fusion = fused(model, *QKV)
    assert fusion.matches == ()
    assert difference(fusion.graph, graph) is None
    (miss,) = fusion.misses
    assert miss.pattern == "attention"
    assert re.search(reason, miss.reason)


def test_the_list_has_equal_misses_once_and_says_where_nothing_was_found():
    def twice(q, k, v):
        return through_a_sine(through_a_sine(q, k, v), k, v)

    fusion = fused(twice, *QKV)
    text = str(listed(fusion, len(fusion.graph.operations)))
    assert "not matched: attention" in text
    assert ", 2 x: the scores go through sin" in text
    assert "leave a match out" not in text
    assert (
        str(listed(fused(jnp.tanh, *QKV[:1]), 1)) == "fusion: none: no kernel computes a part of it"
    )


@pytest.fixture
def cudnn(monkeypatch):
    """Lets code that asks for cuDNN be traced where there is none."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "attention"),
        ({"is_causal": True}, "attention(causal)"),
        ({"key_value_seq_lengths": LENGTHS}, "attention(lengths)"),
        ({"is_causal": True, "local_window_size": 2}, "attention(causal, window)"),
        ({"mask": PADDING[:, None, None] & jnp.ones((B, N, S, S), bool)}, "attention(bias)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_asks_for_cudnn_is_one_match(options, kernel):
    def model(q, k, v, implementation="cudnn"):
        return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)

    given = [x.astype(jnp.bfloat16) for x in QKV]
    fusion = fused(model, *given)
    assert kernels(fusion) == {kernel: 1}
    (got,) = run(fusion.graph, (), given)
    want = model(*(x.astype(jnp.float32) for x in given), implementation="xla")
    assert_close(got, want, reduction=S * H, roundings=4)
