"""Prefill and decode over a KV cache against the forward pass over whole sequences."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
import pbjax
from tests.decoders import DECODERS, call, family, load, make, names, tensors_of

pytestmark = pytest.mark.parametrize("name", DECODERS)
LENGTHS = np.array([3, 9, 6], np.int32)
TOKENS = np.random.default_rng(0).integers(1, 97, (3, 14)).astype(np.int32)
FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@cache
def expected(name):
    """Scores after every token of TOKENS, by the forward pass."""
    return np.asarray(call(load(name), input_ids=TOKENS).logits)


@partial(jax.jit, static_argnums=(0, 1), compiler_options=FAST_COMPILE)
def run(graphdef, method, state, *inputs):
    return getattr(nnx.merge(graphdef, state), method)(*inputs)


def prefill(model, num_keys=14):
    graphdef, state = nnx.split(model)
    cache = model.empty_cache(3, num_keys)
    return run(graphdef, "prefill", state, TOKENS[:, :9], LENGTHS, cache)


def decode(model, tokens, cache):
    graphdef, state = nnx.split(model)
    return run(graphdef, "decode", state, tokens, cache)


def following(lengths, count=1):
    """The next tokens of each row of TOKENS, of which `lengths` are known."""
    columns = np.asarray(lengths)[:, None] + np.arange(count)[None]
    return np.take_along_axis(TOKENS, columns, axis=1)


def check(logits, name, lengths):
    """Scores after the tokens before `lengths`, within the tolerance of all families."""
    count = logits.shape[1]
    columns = np.asarray(lengths)[:, None] - count + np.arange(count)[None]
    wanted = np.take_along_axis(expected(name), columns[:, :, None], axis=1)
    assert np.abs(logits - wanted).max() <= 2e-5 * np.std(wanted)


def test_prefill_gives_the_scores_after_each_last_token(name):
    output = prefill(load(name))
    assert output.logits.shape == (3, 1, 97)
    assert output.cache.lengths.tolist() == LENGTHS.tolist()
    check(output.logits, name, LENGTHS)


def test_decode_gives_the_scores_of_the_forward_pass(name):
    model = load(name)
    held = prefill(model).cache
    for step in range(4):
        output = decode(model, following(LENGTHS + step), held)
        held = output.cache
        check(output.logits, name, LENGTHS + step + 1)
    assert held.lengths.tolist() == (LENGTHS + 4).tolist()


def test_tokens_together_are_tokens_one_by_one(name):
    model = load(name)
    output = decode(model, following(LENGTHS, 4), prefill(model).cache)
    check(output.logits, name, LENGTHS + 4)
    assert output.cache.lengths.tolist() == (LENGTHS + 4).tolist()


def test_row_beyond_its_room_is_nan_and_the_others_are_not(name):
    model = load(name)
    output = decode(model, following(LENGTHS), prefill(model, num_keys=9).cache)
    assert np.isnan(output.logits[1]).all()
    assert np.isfinite(np.asarray(output.logits)[[0, 2]]).all()


def test_what_the_cache_held_before_does_not_count(name):
    model = load(name)
    graphdef, state = nnx.split(model)
    used = jax.tree.map(lambda leaf: leaf + 3, prefill(model).cache)
    output = run(graphdef, "prefill", state, TOKENS[:, :9], LENGTHS, used)
    check(decode(model, following(LENGTHS), output.cache).logits, name, LENGTHS + 1)


def test_cache_shares_no_array_with_the_caller(name):
    model, lengths = load(name), jnp.asarray(LENGTHS)
    found = model.prefill(TOKENS[:, :9], lengths, model.empty_cache(3, 9)).cache
    found.lengths.delete()
    assert not lengths.is_deleted()


def test_cache_has_the_dtype_of_the_weights_and_the_batch_first(name):
    held = load(name, "bfloat16").empty_cache(3, 16)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(held)} == {3}
    assert {leaf.dtype for leaf in held.keys + held.values} == {jnp.dtype("bfloat16")}
    assert len(held.keys) == len(held.values) == load(name).config.num_layers


def test_decode_can_be_split_over_the_batch(name, timer):
    model = load(name)
    held = prefill(model).cache
    fast = pbjax.optimize(model.decode, following(LENGTHS), held, split=(2, 1))
    output = fast(following(LENGTHS), held)
    check(output.logits, name, LENGTHS + 1)
    check(fast(following(LENGTHS + 1), output.cache).logits, name, LENGTHS + 2)


def test_shapes_that_do_not_fit_are_refused(name):
    model = load(name)
    with pytest.raises(models.InputError, match="3 sequences of 8 tokens"):
        model.prefill(TOKENS[:, :9], LENGTHS, model.empty_cache(3, 8))
    with pytest.raises(models.InputError, match="2 sequences of 9 tokens"):
        model.decode(TOKENS[:, :1], model.empty_cache(2, 9))
    with pytest.raises(models.InputError, match="both must be 1 or more"):
        model.empty_cache(3, 0)


def test_model_without_a_head_is_refused(name, tmp_path):
    (base,) = (kind for kind in names(name)["classes"] if "LM" not in kind)
    keys = names(name)["classes"][base]
    tensors = {key: tensors_of(name)[family(name).prefix + key] for key in keys}
    model = models.load(make(tmp_path / "m", name, tensors, architectures=[base]))
    with pytest.raises(models.InputError, match="no language model head"):
        model.prefill(TOKENS[:, :9], LENGTHS, model.empty_cache(3, 9))
