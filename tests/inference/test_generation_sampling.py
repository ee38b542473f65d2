"""Choosing tokens: filters against numpy, draws against probabilities, refused settings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbjax.errors import InputError
from pbjax.inference.generation import sampling
from pbjax.inference.generation.sampling import Sampling, StaticSettings

V = 12
# Steps of an eighth, so that there are equal scores and none that rounding could reorder.
SCORES = st.lists(st.integers(-40, 40), min_size=V, max_size=V).map(
    lambda values: np.array(values, np.float32) / 8
)
PARTS = st.integers(1, 100).map(lambda percent: percent / 100)
FILTERS = st.tuples(
    st.one_of(st.none(), st.integers(1, V + 3)),
    PARTS,
    st.one_of(st.just(0.0), PARTS),
)


# Compiled once for all examples; their settings are arrays.
keep_likely = jax.jit(sampling.keep_likely, static_argnames="sorts")
choose = jax.jit(sampling.choose, static_argnums=4)


def likely(scores, top_k, top_p, min_p):
    """Which tokens may be drawn, token by token in float64: the filters as they are defined."""
    scores = scores.astype(np.float64)
    kept = np.ones(len(scores), bool)
    if top_k is not None and top_k < len(scores):
        kept &= scores >= sorted(scores, reverse=True)[top_k - 1]
    probabilities = np.where(kept, np.exp(scores - scores.max()), 0)
    probabilities /= probabilities.sum()
    top = np.zeros(len(scores), bool)
    for token in sorted(np.flatnonzero(kept), key=lambda t: -scores[t]):
        better = probabilities[kept & (scores > scores[token])].sum()
        same = probabilities[top & (scores == scores[token])].sum()
        top[token] = better + same < top_p
    # Equal scores share one fate.
    top = np.array([top[(scores == s) & kept].any() for s in scores]) & kept
    return top & (np.exp(scores - scores.max()) >= min_p)


def close_call(scores, top_k, top_p, min_p):
    """Whether rounding to f32 can decide."""
    edges = [likely(scores, top_k, p, m) for p in (top_p * (1 - 1e-5), min(1, top_p * (1 + 1e-5)))
             for m in (min_p * (1 - 1e-5), min_p * (1 + 1e-5))]  # fmt: skip
    return any((edge != edges[0]).any() for edge in edges)


def arrays(top_k=None, top_p=1.0, min_p=0.0, temperature=1.0, penalty=1.0, batch_size=1, vocab=V):
    found = Sampling(
        temperature=float(temperature),
        top_k=top_k,
        top_p=float(top_p),
        min_p=float(min_p),
        repetition_penalty=float(penalty),
    )
    return sampling.settings_of(found, batch_size, vocab)


@settings(max_examples=200)
@given(SCORES, FILTERS)
def test_filters_keep_what_their_definitions_keep(scores, filters):
    if close_call(scores, *filters):
        return
    found = keep_likely(jnp.asarray(scores)[None], arrays(*filters), sorts=True)[0]
    np.testing.assert_array_equal(np.isfinite(found), likely(scores, *filters))
    np.testing.assert_array_equal(found[np.isfinite(found)], scores[np.isfinite(found)])


@settings(max_examples=50)
@given(SCORES, FILTERS, st.permutations(range(V)))
def test_order_of_the_vocabulary_does_not_matter(scores, filters, order):
    order = np.array(order)
    one, two = (
        keep_likely(jnp.asarray(s)[None], arrays(*filters), sorts=True)[0]
        for s in (scores, scores[order])
    )
    np.testing.assert_array_equal(np.isfinite(one)[order], np.isfinite(two))


@settings(max_examples=50)
@given(SCORES, FILTERS)
def test_best_token_may_always_be_drawn(scores, filters):
    found = keep_likely(jnp.asarray(scores)[None], arrays(*filters), sorts=True)[0]
    assert np.isfinite(found[scores.argmax()])


@settings(max_examples=50)
@given(SCORES, PARTS)
def test_min_p_alone_needs_no_sorting(scores, min_p):
    one, two = (
        keep_likely(jnp.asarray(scores)[None], arrays(min_p=min_p), sorts=sorts)
        for sorts in (True, False)
    )
    np.testing.assert_array_equal(one, two)


@settings(max_examples=50)
@given(SCORES, st.sets(st.integers(0, V - 1)), st.integers(5, 20).map(lambda tenths: tenths / 10))
def test_penalty_is_that_of_its_definition(scores, seen, penalty):
    mask = np.isin(np.arange(V), list(seen))
    expected = [
        (s / penalty if s > 0 else s * penalty) if there else s
        for s, there in zip(scores, mask, strict=True)
    ]
    found = sampling.penalise(
        jnp.asarray(scores)[None], jnp.asarray(mask)[None], jnp.float32(penalty)[None]
    )
    np.testing.assert_allclose(found[0], np.array(expected, np.float32), rtol=1e-6)


def draw(scores, count, **filters):
    """Tokens that `count` seeds draw from the same scores."""
    static = StaticSettings(draws=True, sorts=True, penalises=False)
    given = arrays(batch_size=count, vocab=len(scores), **filters)
    keys = sampling.keys_of(np.arange(count, dtype=np.uint32), jnp.int32(0))
    rows = jnp.broadcast_to(jnp.asarray(scores, jnp.float32), (count, len(scores)))
    return np.asarray(choose(rows, None, given, keys, static))


def test_draws_have_the_probabilities_of_the_scores_over_the_temperature():
    scores, count = np.array([0.0, 1.0, 2.0, -1.0]), 4000
    expected = np.exp(scores / 0.7) / np.exp(scores / 0.7).sum()
    found = np.bincount(draw(scores, count, temperature=0.7), minlength=4) / count
    # Five standard deviations of a binomial.
    assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / count)).all()


def test_only_likely_tokens_are_drawn():
    assert set(draw(np.array([0.0, 3.0, 1.0, 2.9]), 500, top_k=2)) == {1, 3}


def test_draw_depends_on_the_seed_and_the_step():
    seeds = np.array([7, 7, 8], np.uint32)
    one, two = (sampling.keys_of(seeds, jnp.int32(step)) for step in (0, 1))
    data = np.asarray(jax.random.key_data(jnp.concatenate([one, two])))
    assert (data[0] == data[1]).all()
    assert len({tuple(row) for row in data.tolist()}) == 4


def test_row_of_temperature_zero_takes_the_best_beside_rows_that_draw():
    scores = jnp.broadcast_to(jnp.asarray([0.0, 0.3, 0.1], jnp.float32), (200, 3))
    given = dataclasses.replace(
        arrays(batch_size=200, vocab=3),
        temperature=jnp.asarray([0.0, 1.0] * 100, jnp.float32),
    )
    keys = sampling.keys_of(np.arange(200, dtype=np.uint32), jnp.int32(0))
    static = StaticSettings(draws=True, sorts=False, penalises=False)
    found = np.asarray(choose(scores, None, given, keys, static))
    assert set(found[::2].tolist()) == {1}
    assert set(found[1::2].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_k", -3),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.5),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
    ],
)
def test_setting_without_a_meaning_is_refused(name, value):
    with pytest.raises(InputError, match=rf"generate\({name}={value}\)"):
        Sampling(**({"temperature": 1.0} | {name: value}))


@pytest.mark.parametrize("given", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filter_of_the_best_token_alone_is_refused(given):
    with pytest.raises(InputError, match="raise temperature or leave them out"):
        Sampling(**given)


def test_the_best_token_stays_where_float32_makes_nothing_of_top_p():
    scores = jnp.arange(V, dtype=jnp.float32)[None]
    kept = jnp.isfinite(keep_likely(scores, arrays(top_p=1e-50), sorts=True)[0])
    assert kept.tolist() == [False] * (V - 1) + [True]


def test_kind_is_what_the_settings_need():
    assert Sampling().static == StaticSettings(draws=False, sorts=False, penalises=False)
    assert Sampling(temperature=1.0, min_p=0.1).static == StaticSettings(
        draws=True, sorts=False, penalises=False
    )
    assert Sampling(temperature=1.0, top_p=0.9).static.sorts
    assert Sampling(temperature=1.0, top_k=5).static.sorts
    assert Sampling(repetition_penalty=1.2).static.penalises
