"""Fresh inputs are of the kind of the example; differences are found and refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbjax.graph.trace import trace
from pbjax.runtime.verification import compare, fresh_inputs
from tests.cases import examples
from tests.networks import D, normal, tokens


def graph_of(function, *inputs):
    return trace(lambda params, *args: function(*args), (), *inputs)


GRAPH = graph_of(lambda x: jnp.tanh(x @ jnp.ones((D, D))), *tokens(4))


def refused(split, unsplit, graph=GRAPH):
    fault = compare(graph, split, unsplit).fault
    assert "\n" not in fault
    assert fault.count(";") == 1
    return fault


def largest_difference(graph, split, unsplit):
    found = compare(graph, split, unsplit)
    assert found.fault == ""
    return found.largest


def test_rows_that_belong_together_stay_together():
    ids = jnp.arange(12).reshape(4, 3)
    mask = (jnp.arange(4)[:, None] % 2 == 0) & jnp.ones((4, 3), bool)
    left, right = fresh_inputs((mask, mask.T), (0, 1), seed=3)
    np.testing.assert_array_equal(left, right.T)
    ((again,), (same,)) = fresh_inputs((ids,), (0,), 3), fresh_inputs((ids,), (0,), 3)
    np.testing.assert_array_equal(again, same)


@settings(max_examples=examples(20))
@given(st.integers(0, 2**31), st.integers(-5, 5), st.integers(0, 40))
def test_integers_stay_in_the_range_of_the_example(seed, low, span):
    ids = np.linspace(low, low + span, 12).astype(np.int32).reshape(4, 3)
    (fresh,) = fresh_inputs((jnp.asarray(ids),), (0,), seed)
    assert fresh.dtype == ids.dtype
    assert fresh.shape == ids.shape
    assert low <= int(fresh.min()) <= int(fresh.max()) <= low + span


def test_floats_are_drawn_anew_around_the_example():
    x = 5 + 2 * normal(0, 400, 3)
    (fresh,) = fresh_inputs((x,), (0,), 0)
    assert not np.isin(np.asarray(fresh), np.asarray(x)).any()
    assert abs(float(fresh.mean()) - 5) < 0.5
    assert abs(float(fresh.std()) - 2) < 0.5


def test_both_parts_of_complex_numbers_are_drawn_anew():
    x = normal(0, 400, 3) + 2j + 3j * normal(1, 400, 3)
    (fresh,) = fresh_inputs((x,), (0,), 0)
    assert fresh.dtype == x.dtype
    assert not np.isin(np.asarray(fresh).imag, np.asarray(x).imag).any()
    assert abs(float(fresh.imag.mean()) - 2) < 0.5
    assert abs(float(fresh.imag.std()) - 3) < 0.5
    assert abs(float(fresh.real.std()) - 1) < 0.2


@pytest.mark.parametrize(
    "values", [[0.0, -np.inf, 0.0, -np.inf], [0.0, 1.0, 1.0, 0.0], [0.0, -1e9, 0.0, 0.0]]
)
def test_masks_of_floats_stay_masks(values):
    mask = jnp.asarray(values, jnp.float32)[:, None]
    (fresh,) = fresh_inputs((mask,), (0,), 1)
    assert set(np.unique(fresh)) <= set(np.unique(mask))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.bool_])
def test_dtypes_are_kept(dtype):
    x = jnp.arange(8).reshape(4, 2).astype(dtype)
    (fresh,) = fresh_inputs((x,), (0,), 0)
    assert fresh.dtype == x.dtype
    assert fresh.shape == x.shape


def test_shared_inputs_are_kept():
    shared = normal(1, 7)
    _, fresh = fresh_inputs((*tokens(4), shared), (0, None), 0)
    np.testing.assert_array_equal(fresh, shared)


def test_random_keys_are_drawn_from_the_example():
    keys, shared = jax.random.split(jax.random.key(0), 4), jax.random.key(1)
    fresh, kept = fresh_inputs((keys, shared), (0, None), 0)
    assert fresh.dtype == keys.dtype
    rows = jax.random.key_data(keys).tolist()
    assert all(row in rows for row in jax.random.key_data(fresh).tolist())
    assert kept == shared


def test_different_random_keys_are_refused():
    a, b = jax.random.split(jax.random.key(0), 4), jax.random.split(jax.random.key(1), 4)
    assert largest_difference(GRAPH, (a,), (a,)) == 0.0
    refused((a,), (b,))


def test_different_seeds_differ():
    (a,), (b,) = fresh_inputs(tokens(4), (0,), 0), fresh_inputs(tokens(4), (0,), 1)
    assert not np.array_equal(a, b)


def test_equal_outputs_differ_by_nothing():
    x, nan = normal(0, 3, D), jnp.full((2,), jnp.nan)
    assert largest_difference(GRAPH, (x, nan), (x, nan)) == 0.0


def test_rounding_is_allowed_and_told():
    x = normal(0, 3, D)
    found = largest_difference(GRAPH, (x * (1 + 2.0**-23),), (x,))
    assert 0 < found < 1e-6


def test_no_outputs_differ_by_nothing():
    assert largest_difference(GRAPH, (), ()) == 0.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_wrong_row_is_refused(dtype):
    x = normal(0, 4, D).astype(dtype)
    message = refused((x, x.at[2].multiply(1.1)), (x, x))
    assert "output 1" in message
    assert str(x.dtype) in message


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_value_that_is_not_finite_is_refused(bad):
    x = normal(0, 4, D)
    assert "differs by inf" in refused((x.at[0, 0].set(bad),), (x,))
    assert "differs by inf" in refused((x,), (x.at[0, 0].set(bad),))


@pytest.mark.parametrize("pair", [(jnp.inf, -jnp.inf), (jnp.nan, jnp.inf)])
def test_different_values_that_are_not_finite_are_refused(pair):
    x = normal(0, 4, D)
    a, b = (x.at[0, 0].set(value) for value in pair)
    assert "differs by inf" in refused((a,), (b,))


def test_other_shape_or_dtype_is_refused():
    x = normal(0, 4, D)
    assert "float32[3, 8]" in refused((x[:3],), (x,))
    assert "bfloat16[4, 8]" in refused((x.astype(jnp.bfloat16),), (x,))


def test_few_flipped_integers_are_allowed_and_many_refused():
    x = jnp.zeros(1000, jnp.int32)
    assert largest_difference(GRAPH, (x.at[:5].set(1),), (x,)) == pytest.approx(0.005)
    refused((x.at[:20].set(1),), (x,))
    refused((x.astype(bool).at[:20].set(True),), (x.astype(bool),))


def test_longer_sums_may_differ_by_more():
    x = normal(0, 4, D) * 1000
    short = graph_of(lambda x: x @ jnp.ones((D, D)), jnp.zeros((4, D)))
    long = graph_of(lambda x: x @ jnp.ones((2**16, D)), jnp.zeros((4, 2**16)))
    off = x.at[0, 0].add(0.05)
    refused((off,), (x,), short)
    assert largest_difference(long, (off,), (x,)) > 0


def test_complex_outputs_are_compared():
    x = normal(0, 4, D) + 1j * normal(1, 4, D)
    refused((x * 1.5,), (x,))
    refused((x + 0.5j,), (x,))
    assert 0 < largest_difference(GRAPH, (x * (1 + 2.0**-23),), (x,)) < 1e-6


LABELS = np.arange(24)[::-1] * 7
RANKINGS = {
    "top_k": lambda s: jax.lax.top_k(s, 5)[1],
    "argmax": lambda s: jnp.argmax(s, -1).reshape(4, 8).astype(jnp.float32),
    "argmin": lambda s: jnp.argmin(s, -1),
    "argsort": lambda s: jnp.argsort(s, axis=0, descending=True),
    "approx_max_k": lambda s: jax.lax.approx_max_k(s, 3)[1].T,
    "labels": lambda s: jnp.where(s[:, :5] > -99, jnp.asarray(LABELS)[jax.lax.top_k(s, 5)[1]], -1),
    "payload": lambda s: jax.lax.sort((s, jnp.broadcast_to(LABELS, s.shape)), num_keys=1)[1],
    "values": lambda s: jnp.take_along_axis(s * LABELS[None], jnp.argmax(s, -1)[:, None], 1),
}


@pytest.fixture(scope="module")
def scores():
    """Scores in bf16, and the same rounded otherwise in their last bits."""
    rng = np.random.default_rng(0)
    rows, weights = (rng.normal(size=s).astype(jnp.bfloat16) for s in ((32, 512), (512, 24)))
    weights[:, 12:] = weights[:, :12]  # ties
    product = (rows @ weights).astype(np.float32)
    moved = product * (1 + 2.0**-7 * rng.integers(-1, 2, product.shape))
    return jnp.asarray(rows), jnp.asarray(weights), jnp.asarray(moved, jnp.bfloat16)


@pytest.mark.parametrize("name", RANKINGS)
def test_near_ties_may_fall_either_way_and_other_indices_may_not(name, scores):
    rows, weights, moved = scores
    ranking = RANKINGS[name]
    graph = trace(lambda params, x: ranking(x @ params), weights, rows)
    values = weights, *map(jnp.asarray, graph.constants), rows
    expected = ranking(rows @ weights)
    found = ranking(moved)
    assert bool(jnp.any(found != expected))
    assert compare(graph, (found,), (expected,), values).fault == ""
    # Without the values nothing tells a near-tie, and the best row's choice for all is wrong.
    if not jnp.issubdtype(found.dtype, jnp.bfloat16):
        assert compare(graph, (found,), (expected,)).fault
    wrong = jnp.roll(expected, 1, axis=0)
    assert compare(graph, (wrong,), (expected,), values).fault
