"""Calling an `Optimized`: buckets, padding, other params, and what it refuses."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pbjax
from pallas_kernels.testing import assert_close
from pbjax import errors
from tests.fakes import FakeTimer
from tests.networks import NETWORKS, D, NnxLoop, T, normal, tokens


@pytest.fixture(scope="module")
def bucketed():
    """A model with a batch-second input and output, for batches of 1, 3 and 5."""
    network = NETWORKS["two_axes"](2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        FakeTimer().install(monkeypatch)
        fast = pbjax.optimize(
            network.model, *network.inputs(5), batch_axes=network.batch_axes, buckets=(3, 1)
        )
    return network, fast


@pytest.fixture(scope="module")
def module():
    model = NnxLoop(2, nnx.Rngs(0))
    with pytest.MonkeyPatch.context() as monkeypatch:
        FakeTimer().install(monkeypatch)
        return model, pbjax.optimize(model, *tokens(4), split=(3, 1))


def compiled(monkeypatch_free_call):
    """How many programs XLA compiles during a call."""
    seen = []

    def listener(event, duration, **_):
        if "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        monkeypatch_free_call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    return len(seen)


def refused(call, kind=errors.InputError):
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    assert message.count(";") >= 2
    return message


def test_buckets_are_declared_in_order(bucketed):
    _, fast = bucketed
    assert fast.buckets == (1, 3, 5)
    assert fast.plan.batch_size == 5


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5])
def test_padding_is_invisible(bucketed, batch_size):
    network, fast = bucketed
    inputs = network.inputs(batch_size)
    for a, b in zip(fast(*inputs), network.direct(*inputs), strict=True):
        assert a.shape == b.shape
        assert_close(a, b, reduction=12, roundings=20)


def test_garbage_in_other_rows_does_not_reach_a_row(bucketed):
    network, fast = bucketed
    x, lengths, scale = network.inputs(4)
    other = x.at[:, 1:].set(jnp.nan)
    np.testing.assert_array_equal(
        fast(other, lengths, scale)[0][:, 0], fast(x, lengths, scale)[0][:, 0]
    )


def test_a_thousand_calls_of_random_sizes_compile_nothing(bucketed):
    network, fast = bucketed
    batches = {size: network.inputs(size) for size in range(1, 6)}
    for inputs in batches.values():
        jax.block_until_ready(fast(*inputs))
    sizes = np.random.default_rng(0).integers(1, 6, 1000)
    assert compiled(lambda: [fast(*batches[size]) for size in sizes]) == 0


def test_the_first_call_of_every_size_compiles_nothing():
    network = NETWORKS["no_repetition"](1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        FakeTimer().install(monkeypatch)
        fast = pbjax.optimize(network.model, *network.inputs(7), split=(4, 3))
    batches = [network.inputs(size) for size in range(1, 8)]
    assert compiled(lambda: [fast(*inputs) for inputs in batches]) == 0


def test_compilations_are_seen_by_the_counter():
    assert compiled(lambda: jax.jit(lambda x: x * 3 + 1)(jnp.zeros(13))) >= 1


def test_inputs_of_numpy_give_the_same(bucketed):
    network, fast = bucketed
    for size in (4, 5):
        inputs = network.inputs(size)
        for a, b in zip(fast(*jax.tree.map(np.asarray, inputs)), fast(*inputs), strict=True):
            np.testing.assert_array_equal(a, b, strict=True)


def test_larger_batch_is_refused(bucketed):
    network, fast = bucketed
    message = refused(lambda: fast(*network.inputs(6)))
    assert "call(batch=6)" in message
    assert "(1, 3, 5)" in message


def test_empty_batch_is_refused(bucketed):
    _, fast = bucketed
    empty = jnp.zeros((T, 0, D)), jnp.zeros((1, 0), jnp.int32), jnp.float32(1)
    assert "call(batch=0)" in refused(lambda: fast(*empty))


@pytest.mark.parametrize("batch_size", [4, 5])
def test_wrong_dtype_is_refused(bucketed, batch_size):
    network, fast = bucketed
    x, lengths, scale = network.inputs(batch_size)
    message = refused(lambda: fast(x.astype(jnp.bfloat16), lengths, scale))
    assert "input 0 is bfloat16" in message
    assert "float32" in message


@pytest.mark.parametrize("batch_size", [4, 5])
def test_wrong_shape_is_refused(bucketed, batch_size):
    network, fast = bucketed
    x, lengths, scale = network.inputs(batch_size)
    assert "input 0 is float32[2, " in refused(lambda: fast(x[:2], lengths, scale))


@pytest.mark.parametrize("batch_size", [4, 5])
def test_unequal_rows_are_refused(bucketed, batch_size):
    network, fast = bucketed
    x, lengths, scale = network.inputs(batch_size)
    assert "input 1" in refused(lambda: fast(x, lengths[:, :-1], scale))
    assert "input 1" in refused(lambda: fast(x, lengths[0], scale))


def test_wrong_structure_is_refused(bucketed):
    network, fast = bucketed
    x, lengths, scale = network.inputs(5)
    refused(lambda: fast(x, lengths), errors.InputTypeError)
    refused(lambda: fast(x, {"lengths": lengths}, scale), errors.InputTypeError)
    refused(lambda: fast(), errors.InputTypeError)


@pytest.mark.parametrize("scalar", [3.0, 3, "text", np.float32(3.0), jnp.float32(3.0)])
def test_scalar_in_place_of_an_array_is_refused(bucketed, scalar):
    network, fast = bucketed
    x, lengths, scale = network.inputs(5)
    assert "input 0" in refused(lambda: fast(scalar, lengths, scale))
    assert "input 1" in refused(lambda: fast(x, scalar, scale))


def test_python_number_for_a_shared_array_is_refused(bucketed):
    network, fast = bucketed
    x, lengths, _ = network.inputs(5)
    assert "input 2 is float;" in refused(lambda: fast(x, lengths, 0.7))


def test_apply_with_own_params_gives_the_same(module):
    model, fast = module
    state = nnx.state(model)
    for size in (2, 4):
        np.testing.assert_array_equal(fast.apply(state, *tokens(size)), fast(*tokens(size)))


def test_apply_with_other_params_is_that_model(module):
    _, fast = module
    other = NnxLoop(2, nnx.Rngs(5))
    for size in (2, 4):
        found = fast.apply(nnx.state(other), *tokens(size))
        assert_close(found, other(*tokens(size)), reduction=12, roundings=20)


def test_apply_leaves_the_own_weights_alone(module):
    model, fast = module
    fast.apply(jax.tree.map(jnp.zeros_like, nnx.state(model)), *tokens(4))
    assert_close(fast(*tokens(4)), model(*tokens(4)), reduction=12, roundings=20)


def test_apply_with_params_of_another_structure_is_refused(module):
    _, fast = module
    assert "apply(params)" in refused(lambda: fast.apply((), *tokens(4)))
    other = nnx.state(NnxLoop(3, nnx.Rngs(0)))
    assert "apply(params)" in refused(lambda: fast.apply(other, *tokens(4)))


def test_apply_with_params_of_other_shapes_or_dtypes_is_refused(module):
    model, fast = module
    state = nnx.state(model)
    wide = jax.tree.map(lambda x: jnp.concatenate([x, x]), state)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    assert "leaf 0 is float32[10]" in refused(lambda: fast.apply(wide, *tokens(4)))
    assert "leaf 0 is bfloat16[5]" in refused(lambda: fast.apply(half, *tokens(4)))


def test_closed_callable_is_refused_and_holds_no_weights(monkeypatch):
    FakeTimer().install(monkeypatch)
    model = NETWORKS["no_repetition"](1).model
    fast = pbjax.optimize(model, *tokens(4), split=(3, 1))
    plan, report = fast.plan, fast.report()
    weight = weakref.ref(fast._runner._buckets[4].weights[0])
    fast.close()
    fast.close()
    assert "close()" in refused(lambda: fast(*tokens(4)))
    assert "close()" in refused(lambda: fast.apply((), *tokens(4)))
    assert fast.plan == plan
    assert fast.report() is report
    del model
    gc.collect()
    assert weight() is None


def test_layers_of_a_deleted_model_are_held_stacked_alone(monkeypatch):
    FakeTimer().install(monkeypatch)
    model = NnxLoop(2, nnx.Rngs(0))
    fast = pbjax.optimize(model, *tokens(4), split=(3, 1))
    layers = [weakref.ref(leaf) for leaf in jax.tree.leaves(nnx.state(model))]
    own = {id(weight) for weight in fast._runner._buckets[4].weights}
    stacked = [layer for layer in layers if id(layer()) not in own]
    assert stacked
    del model
    gc.collect()
    assert all(layer() is None for layer in stacked)


@pytest.mark.parametrize("rows", [4, 3])  # as it is, and padded
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_call_inside_a_transformation_is_refused(module, transform, rows):
    _, fast = module
    (x,) = tokens(rows)
    call = transform(lambda scale: fast(x * scale).sum())
    refused(lambda: call(jnp.ones(2) if transform is jax.vmap else 1.0), errors.InputTypeError)


def test_callable_weights_are_passed_not_baked_in(monkeypatch):
    FakeTimer().install(monkeypatch)
    weights = normal(1, D, D)
    fast = pbjax.optimize(lambda x: jnp.tanh(x @ weights), *tokens(4), split=(3, 1))
    assert sum(w.size for w in fast._runner._buckets[4].weights) == weights.size


def test_random_keys_are_inputs_and_outputs_like_others(monkeypatch):
    FakeTimer().install(monkeypatch)

    def noisy(x, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (D,)))(keys)
        return jnp.tanh(x @ normal(0, D, D)) + noise, keys

    inputs = normal(1, 4, D), jax.random.split(jax.random.key(0), 4)
    fast = pbjax.optimize(noisy, *inputs, split=(3, 1))
    for rows in (4, 3):
        batch = tuple(x[:rows] for x in inputs)
        (found, keys), (expected, _) = fast(*batch), noisy(*batch)
        assert_close(found, expected, reduction=D)
        assert (keys == batch[1]).all()
    refused(lambda: fast(inputs[0], jax.random.key_data(inputs[1])))
    refused(lambda: fast(inputs[1], inputs[1]))
