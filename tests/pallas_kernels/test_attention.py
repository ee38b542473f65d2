"""Attention on three layers: the interpreter with its race detector, lowering, and SASS."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import use_abstract_mesh

from pallas_kernels.attention import attention, attention_reference, items
from pallas_kernels.attention.relative import shift_words
from pallas_kernels.attention.shapes import CAPPED, MODELS, RAGGED, SWEEP
from pallas_kernels.attention.tile import ROWS, Problem, Tile, choose_tile
from pallas_kernels.testing import assert_close
from tests.attention_calls import (
    BY_NAME,
    H200,
    abstract,
    assert_right,
    interpreted,
    operands,
    shape,
)
from tests.cases import long_but
from tests.kernels_aot_process import ptxas_reports

INTERPRETED = {
    "rows and keys in no multiple of 8": (shape(67, 131), {}),
    "chunk of a prompt with a window": (
        shape(130, 200, causal=True, lengths=True, query_starts=True, window=90),
        {"lengths": [150], "starts": [20]},
    ),
    "chunk of a prompt": (
        shape(72, 200, causal=True, lengths=True, query_starts=True),
        {"lengths": [190], "starts": [101]},
    ),
    "rows that are padding": (
        shape(136, 136, batch_size=2, lengths=True, query_lengths=True),
        {"lengths": [70, -5]},
    ),
    "causal with alibi and bias": (
        shape(72, 72, n=2, k=1, batch_size=2, causal=True, alibi=True, bias_batch=2),
        {},
    ),
    "alibi both ways": (shape(72, 136, alibi=True), {}),
    "softcap, biases by key, by score and alibi": (
        shape(72, 200, n=2, alibi=True, bias_batch=1, key_bias=True, softcap=0.5),
        {},
    ),
    "keys that count of a causal chunk": (
        shape(72, 200, causal=True, lengths=True, query_starts=True, key_bias=True),
        {"lengths": [190], "starts": [101]},
    ),
    "softcap of scores by difference": (shape(72, 72, relative=True, softcap=1.0), {}),
    "scores by difference": (shape(72, 136, n=2, k=1, relative=True), {}),
    "scores by difference, rows that are padding": (
        shape(136, 136, batch_size=2, lengths=True, query_lengths=True, relative=True),
        {"lengths": [70, 0]},
    ),
    "output staged over the queries": (shape(72, 72, h=136, causal=True), {}),
}


@pytest.mark.parametrize("name", long_but(INTERPRETED, "scores by difference"))
def test_interpreted_kernel_is_right_and_free_of_races(name):
    case, given = INTERPRETED[name]
    args, terms = operands(case, **given)
    assert_right(interpreted(args, terms), args, terms)


@pytest.mark.long
def test_three_consumers_of_which_two_have_no_rows():
    args, terms = operands(shape(200, 136), dtype=jnp.float16)
    tile = Tile(consumers=3, block_kv=64)
    assert_right(interpreted(args, terms, tile), args, terms)


@pytest.mark.long
def test_three_consumers_with_two_masked_tiles():
    args, terms = operands(shape(392, 392, causal=True))
    assert_right(interpreted(args, terms, Tile(consumers=3)), args, terms)


@pytest.mark.long
def test_scores_by_difference_with_key_tiles_of_two_row_tiles():
    args, terms = operands(shape(200, 264, relative=True))
    assert_right(interpreted(args, terms, Tile()), args, terms)


@pytest.mark.parametrize("parts", [2, 3])
def test_registers_of_scores_by_difference_are_brought_to_their_keys(parts):
    scores = np.random.default_rng(0).normal(size=(ROWS, parts * ROWS))
    thread = np.arange(128)
    first, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)

    def words(octet, e):
        """What each thread holds: of its upper row from the next octet, and of its lower row."""
        upper = scores[first, 8 * octet + 8 + column + e]
        return upper + 1j * scores[first + 8, 8 * octet + column + e]

    def shuffle(word, lane):
        assert np.array_equal(lane // 4, thread % 32 // 4)  # it stays in its row
        return word[thread // 32 * 32 + lane]

    given = [(words(octet, 0), words(octet, 1)) for octet in range(8 * parts - 1)]
    shifted = shift_words(given, thread, np.where, shuffle)
    t, s = np.arange(ROWS)[:, None], np.arange((parts - 1) * ROWS)[None]
    expected, actual = scores[t, ROWS - 1 - t + s], np.zeros((ROWS, (parts - 1) * ROWS))
    for octet, pair in enumerate(shifted):
        for e, word in enumerate(pair):
            actual[first, 8 * octet + column + e] = word.real
            actual[first + 8, 8 * octet + column + e] = word.imag
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.long
def test_sequences_of_odd_length_are_taken_as_packed_without_a_copy():
    args, terms = operands(shape(67, 67, batch_size=8, h=64, lengths=True), lengths=range(60, 68))
    assert_right(interpreted(args, terms), args, terms)
    operand_shapes, run = abstract(BY_NAME["vit-base 256x197"])
    with use_abstract_mesh(H200):
        assert "pad" not in str(jax.make_jaxpr(run)(*operand_shapes))


@pytest.mark.parametrize("counted", long_but([0.0, 5.0]))
def test_keys_at_the_end_that_do_not_count_are_lengths(counted):
    """Whatever they are biased by, which is no number a kernel could add."""
    args, terms = operands(shape(72, 200, batch_size=2, lengths=True), lengths=[70, 200])
    hidden = jnp.arange(200)[None] >= terms["lengths"][:, None]
    given = terms | {"lengths": None, "key_bias": jnp.where(hidden, -1e38, counted)}
    assert_right(interpreted(args, given), args, terms)


@pytest.mark.long
def test_tile_that_reaches_beyond_one_sequence_leaves_the_next_alone():
    args, terms = operands(shape(72, 128, batch_size=2))
    tile = Tile(block_kv=64, holds=True)
    both = interpreted(args, terms, tile)
    assert_right(both, args, terms)
    second = interpreted(tuple(x[1:] for x in args), terms, tile)
    np.testing.assert_array_equal(np.asarray(both[1:], np.float32), np.asarray(second, np.float32))


@pytest.mark.parametrize(
    "case",
    [
        shape(33, 77, n=4, k=2, batch_size=2, causal=True, lengths=True, query_starts=True),
        shape(64, 64, batch_size=2, causal=True, window=9, lengths=True, query_lengths=True),
        shape(64, 64, n=4, k=4, alibi=True),
        shape(64, 64, n=2, batch_size=2, alibi=True, bias_batch=1),
        shape(33, 77, n=4, k=2, batch_size=2, lengths=True, relative=True),
        shape(64, 64, n=2, batch_size=2, causal=True, bias_batch=2, relative=True),
        shape(33, 77, n=4, k=2, batch_size=2, causal=True, softcap=0.5, alibi=True, lengths=True),
        shape(33, 77, n=4, k=2, batch_size=2, key_bias=True),
        shape(33, 77, n=2, k=2, bias_batch=1, key_bias=True, relative=True, softcap=1.0),
    ],
)
def test_xla_agrees_with_the_reference(case):
    args, terms = operands(case, dtype=jnp.float32)
    actual = attention(*args, **terms, implementation="xla")
    expected = attention_reference(*args, **terms)
    assert_close(actual, expected, reduction=case.num_keys * case.head_dim)


@pytest.mark.parametrize("softcap", [None, 1.0])
def test_xla_gives_zero_where_no_key_counts(softcap):
    args, terms = operands(shape(8, 16, lengths=True, softcap=softcap), lengths=[0])
    assert not np.any(np.asarray(attention(*args, **terms, implementation="xla"), np.float32))


def test_f16_compiles_for_a_cpu():
    args, terms = operands(shape(16, 16), dtype=jnp.float16)
    actual = jax.jit(functools.partial(attention, **terms))(*args)
    assert actual.dtype == jnp.float16
    assert_close(actual, attention_reference(*args, **terms), reduction=16 * 64)


def test_default_is_xla_without_a_gpu():
    args, terms = operands(shape(16, 16))
    text = jax.jit(functools.partial(attention, **terms)).lower(*args).as_text()
    assert "mosaic_gpu" not in text


@pytest.mark.parametrize("name", long_but(case.name for case in [*MODELS, *CAPPED, *RAGGED]))
def test_every_shape_lowers_to_one_kernel_of_its_name(name):
    operand_shapes, run = abstract(BY_NAME[name])
    with use_abstract_mesh(H200):
        text = jax.jit(run).trace(*operand_shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert "pbjax_attention" in text


@pytest.mark.parametrize(
    "case", [shape(256, 256, batch_size=8, causal=True), shape(67, 67, h=64, batch_size=8)]
)
def test_tables_of_the_shape_are_no_operands_of_the_traced_operation(case):
    args, terms = operands(case)
    with use_abstract_mesh(H200):
        jaxpr = jax.make_jaxpr(functools.partial(attention, **terms))(*args)
    (equation,) = jaxpr.eqns
    assert [x.aval.shape for x in equation.invars] == [x.shape for x in args]


def test_budget_is_the_grid():
    operand_shapes, run = abstract(shape(512, 512, n=8, k=8, h=64, batch_size=4))
    with use_abstract_mesh(H200):
        jaxpr = str(jax.make_jaxpr(functools.partial(run, sm_budget=47))(*operand_shapes))
    assert "'sm': 47" in jaxpr or "grid=(47" in jaxpr


@pytest.mark.long
def test_models_compile_without_spills_and_no_shape_with_serialised_products():
    reports = ptxas_reports([case.name for case in [*MODELS, *CAPPED, *RAGGED]])
    # With ALiBi the addresses of six barriers find no register: stored once, read once an item.
    allowed = {"bloom-7b1 8x512": 6 * (4 + 4)}
    # Causal heads of 256 spill the same without a cap.
    models = {case.name: reports[case.name]["spilled"] for case in [*MODELS, *CAPPED[1:]]}
    assert not [name for name, spilled in models.items() if spilled > allowed.get(name, 0)]
    assert not [name for name, report in reports.items() if report["codes"]]


def problem_of(case):
    return Problem(
        batch_size=case.batch_size,
        num_queries=case.num_queries,
        num_keys=case.num_keys,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        scale=1.0,
        causal=case.causal,
    )


@pytest.mark.parametrize(
    "case", [case for case in SWEEP if case.causal], ids=lambda case: case.name
)
def test_causal_items_are_dealt_once_each_and_evenly(case):
    problem = problem_of(case)
    tile = choose_tile(problem)
    dealt = [row[1 : 1 + row[0]] for row in items.deal(problem, tile, 132)]
    everything = np.sort(np.concatenate(dealt))
    np.testing.assert_array_equal(everything, np.arange(items.num_items(problem, tile)))

    tiles, section = items.num_tiles(problem, tile), problem.heads_per_section()
    steps = [sum(tiles - item % (section * tiles) // section for item in items) for items in dealt]
    assert max(steps) <= 1.05 * np.mean(steps)


def test_rows_of_differences_that_are_not_met_are_not_read():
    args, terms = operands(shape(16, 24, relative=True), dtype=jnp.float32)
    more = jnp.pad(terms["relative_rows"], ((0, 9), (0, 0), (0, 0)), constant_values=jnp.nan)
    actual = attention(*args, **terms | {"relative_rows": more}, implementation="xla")
    assert_close(actual, attention_reference(*args, **terms), reduction=24 * 32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [case.name for case in [*MODELS, *CAPPED, *RAGGED]])
def test_kernel_on_the_gpu_is_right_and_repeats(name):
    args, terms = operands(BY_NAME[name])
    run = jax.jit(functools.partial(attention, **terms, implementation="mosaic_gpu"))
    first = run(*args)
    assert_right(first, args, terms)
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(run(*args)), np.asarray(first))
