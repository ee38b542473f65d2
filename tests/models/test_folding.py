"""Norms folded into products: weights, how exact 16 bits are, decoding, copies."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.errors import InputError
from models.folding import FoldedNorm, fold, values_of
from models.kernels import PLAIN, Kernels, with_kernels
from models.layers import layer_norm, linear
from pallas_kernels.gemm import ScaledRows
from tests.decoders import DECODERS, call, load

FOLDED = Kernels(gemm="pallas", norm="folded")
EPS = 1e-5


@cache
def folded(name):
    return with_kernels(load(name), FOLDED)


@nnx.jit
def prefill(model, *inputs):
    return model.prefill(*inputs)


@nnx.jit
def decode(model, *inputs):
    return model.decode(*inputs)


def norm_and_linear(*, use_bias=True, dtype="float32"):
    """A LayerNorm and a Linear with random weights."""
    norm = layer_norm(128, EPS, dtype, nnx.Rngs(0))
    after = linear(128, 64, dtype, nnx.Rngs(1), use_bias=use_bias)
    generator = np.random.default_rng(0)
    norm.scale[...] = jnp.asarray(1 + 0.3 * generator.normal(size=128), dtype)
    norm.bias[...] = jnp.asarray(generator.normal(size=128), dtype)
    after.kernel[...] = jnp.asarray(generator.normal(size=(128, 64)), dtype)
    if use_bias:
        after.bias[...] = jnp.asarray(generator.normal(size=64), dtype)
    return norm, after


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_folded_norm_is_norm_and_linear(use_bias):
    norm, after = norm_and_linear(use_bias=use_bias)
    x = jnp.asarray(3 + np.random.default_rng(2).normal(size=(2, 5, 128)), jnp.float32)
    expected = after(norm(x))
    rest = norm.fold_into(after)
    assert rest == FoldedNorm(eps=EPS, centred=True)
    np.testing.assert_allclose(after.after_norm(rest(x)), expected, rtol=1e-4, atol=1e-4)


def test_factors_that_a_product_gave_are_not_computed_again():
    rows = ScaledRows(jnp.ones((2, 5, 128)), jnp.full((2, 5), 7.0))
    assert FoldedNorm(eps=EPS, centred=True)(rows) is rows
    assert values_of(rows) is rows.values


def test_a_norm_without_mean_keeps_the_mean_of_weights():
    _, after = norm_and_linear(use_bias=False)
    weight, gain = np.asarray(after.kernel[...]), np.linspace(1, 2, 128, dtype=np.float32)
    fold([after], jnp.asarray(gain), None, eps=EPS, centred=False)
    np.testing.assert_allclose(after.kernel[...], weight * gain[:, None], rtol=1e-6)
    assert after.bias is None


@pytest.mark.parametrize("mean", [0, 1, 10, 100])
def test_a_mean_in_the_rows_costs_less_than_twice_what_rounding_them_has(mean):
    exact = mean + np.random.default_rng(0).normal(size=(1, 256, 128))
    norm, after = norm_and_linear()
    truth = after(norm(jnp.asarray(exact, jnp.float32)))
    norm, after = norm_and_linear(dtype="bfloat16")
    x = jnp.asarray(exact, jnp.bfloat16)
    plain = after(norm(x))
    found = after.after_norm(norm.fold_into(after)(x))
    errors = [np.std(np.asarray(y, np.float32) - truth) for y in (plain, found)]
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize("name", DECODERS)
def test_decode_with_folded_norms_gives_the_scores_of_the_plain_forward_pass(name):
    tokens = np.random.default_rng(0).integers(1, 97, (3, 8)).astype(np.int32)
    plain = load(name)
    model = folded(name)
    wanted = np.asarray(call(plain, input_ids=tokens).logits)
    held = prefill(model, tokens[:, :7], np.full(3, 7, np.int32), model.empty_cache(3, 8))
    output = decode(model, tokens[:, 7:], held.cache)
    for found, column in ((held, 6), (output, 7)):
        error = np.abs(found.logits[:, 0] - wanted[:, column]).max()
        assert error <= 2e-5 * np.std(wanted)


@pytest.mark.parametrize("kernels", [PLAIN, Kernels(gemm="pallas", norm="pallas")])
def test_folded_norms_are_not_taken_for_others(kernels):
    model = folded("gpt2")
    with pytest.raises(InputError, match=r"folded into its products.*as it was loaded"):
        with_kernels(model, kernels)


@pytest.mark.parametrize("name", DECODERS)
def test_the_given_model_keeps_its_norms_and_weights(name):
    plain = load(name)
    before = jax.tree.leaves(nnx.state(plain))
    with_kernels(plain, FOLDED)
    after = jax.tree.leaves(nnx.state(plain))
    assert all(a is b for a, b in zip(before, after, strict=True))
