"""Attention on three layers: the interpreter with its race detector, lowering, and SASS."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.attention import attention, attention_reference, items, mosaic_gpu
from pallas_kernels.attention.api import check_attention, check_relative
from pallas_kernels.attention.relative import shift_words
from pallas_kernels.attention.shapes import MODELS, RAGGED, SHAPES, SWEEP, AttentionShape
from pallas_kernels.attention.tile import ROWS, Problem, Tile, choose_tile
from pallas_kernels.testing import assert_close
from tests.kernels_aot_process import ptxas_reports

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
SMALL = Tile(block_kv=64)
BY_NAME = {case.name: case for case in SHAPES}
NO_TERMS = dict.fromkeys(
    (
        *("window", "lengths", "query_lengths", "query_starts", "alibi_slopes", "bias"),
        *("relative_rows", "relative_shift"),
    )
)


def shape(t, s, *, n=1, k=1, h=32, batch_size=1, **terms):
    return AttentionShape(
        name="test",
        batch_size=batch_size,
        num_queries=t,
        num_keys=s,
        num_heads=n,
        num_kv_heads=k,
        head_dim=h,
        **terms,
    )


def operands(case, *, dtype=jnp.bfloat16, lengths=None, starts=None):
    """Random q, k, v of a shape, and its terms."""
    keys = jax.random.split(jax.random.key(0), 8)
    b, t, s, n, h = case.batch_size, case.num_queries, case.num_keys, case.num_heads, case.head_dim
    q = jax.random.normal(keys[0], (b, t, n, h), dtype)
    k, v = (jax.random.normal(key, (b, s, case.num_kv_heads, h), dtype) for key in keys[1:3])
    terms = NO_TERMS | {"causal": case.causal, "window": case.window, "scale": h**-0.5}
    if case.lengths:
        drawn = jax.random.randint(keys[3], (b,), 0, s + 1)
        terms["lengths"] = drawn if lengths is None else jnp.array(lengths, jnp.int32)
    if case.query_lengths:
        terms["query_lengths"] = jnp.minimum(terms["lengths"], t)
    if case.query_starts:
        drawn = jax.random.randint(keys[4], (b,), 0, max(s - t, 0) + 1)
        terms["query_starts"] = drawn if starts is None else jnp.array(starts, jnp.int32)
    if case.alibi:
        terms["alibi_slopes"] = 2.0 ** (-8 * (jnp.arange(n, dtype=jnp.float32) + 1) / n)
    if case.bias_batch:
        terms["bias"] = jax.random.normal(keys[5], (case.bias_batch, n, t, s), dtype)
    if case.relative:
        terms["relative_rows"] = jax.random.normal(keys[6], (t + s - 1, n, h), dtype)
        terms["relative_shift"] = jax.random.normal(keys[7], (n, h), dtype)
    return (q, k, v), terms


def interpreted(args, terms, tile=SMALL):
    """The kernel's result on two CTAs in the interpreter, which must see no race."""

    def run(q, k, v):
        return mosaic_gpu.attention(q, k, v, **terms, sms=2, tile=tile, interpret=True)

    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            out = jax.block_until_ready(jax.jit(run)(*args))
        assert not interpreter.get_races().races_found
        return out
    finally:
        interpreter.reset_gpu_interpret_mode_state()


def assert_right(actual, args, terms):
    """The weights are rounded once before they meet the values; scores are sums over the head."""
    expected = attention_reference(*args, **terms)
    assert_close(actual, expected, reduction=args[1].shape[1], roundings=1)


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
    "scores by difference": (shape(72, 136, n=2, k=1, relative=True), {}),
    "scores by difference, rows that are padding": (
        shape(136, 136, batch_size=2, lengths=True, query_lengths=True, relative=True),
        {"lengths": [70, 0]},
    ),
    "output staged over the queries": (shape(72, 72, h=136, causal=True), {}),
}


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernel_is_right_and_free_of_races(name):
    case, given = INTERPRETED[name]
    args, terms = operands(case, **given)
    assert_right(interpreted(args, terms), args, terms)


def test_three_consumers_of_which_two_have_no_rows():
    args, terms = operands(shape(200, 136), dtype=jnp.float16)
    tile = Tile(consumers=3, block_kv=64)
    assert_right(interpreted(args, terms, tile), args, terms)


def test_three_consumers_with_two_masked_tiles():
    args, terms = operands(shape(392, 392, causal=True))
    assert_right(interpreted(args, terms, Tile(consumers=3)), args, terms)


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


def test_sequences_of_odd_length_are_taken_as_packed_without_a_copy():
    args, terms = operands(shape(67, 67, batch_size=8, h=64, lengths=True), lengths=range(60, 68))
    assert_right(interpreted(args, terms), args, terms)
    operand_shapes, run = abstract(BY_NAME["vit-base 256x197"])
    with use_abstract_mesh(H200):
        assert "pad" not in str(jax.make_jaxpr(run)(*operand_shapes))


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
    ],
)
def test_xla_agrees_with_the_reference(case):
    args, terms = operands(case, dtype=jnp.float32)
    actual = attention(*args, **terms, implementation="xla")
    expected = attention_reference(*args, **terms)
    assert_close(actual, expected, reduction=case.num_keys * case.head_dim)


def test_xla_gives_zero_where_no_key_counts():
    args, terms = operands(shape(8, 16, lengths=True), lengths=[0])
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


def abstract(case):
    """The arrays of a shape without their values, and a function that runs the kernel on them."""
    _, terms = operands(shape(8, 8))
    static = {"causal": case.causal, "window": case.window, "scale": case.head_dim**-0.5}

    def draw():
        args, terms = operands(case)
        return args, {name: x for name, x in terms.items() if isinstance(x, jax.Array)}

    def run(args, arrays, **options):
        return attention(*args, **arrays, **static, implementation="mosaic_gpu", **options)

    assert terms.keys() >= static.keys()
    return jax.eval_shape(draw), run


@pytest.mark.parametrize("name", [case.name for case in [*MODELS, *RAGGED]])
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


def test_models_compile_without_spills_and_no_shape_with_serialised_products():
    reports = ptxas_reports([case.name for case in [*MODELS, *RAGGED]])
    # With ALiBi the addresses of six barriers find no register: stored once, read once an item.
    allowed = {"bloom-7b1 8x512": 6 * (4 + 4)}
    models = {case.name: reports[case.name]["spilled"] for case in MODELS}
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


def check(counts=None, **changes):
    given = dict.fromkeys(("window", "alibi_slopes", "bias")) | {"causal": False}
    counts = {"lengths": None, "query_lengths": None, "query_starts": None} | (counts or {})
    q = jnp.zeros((2, 8, 4, 64), jnp.bfloat16)
    k = jnp.zeros((2, 16, 2, 64), jnp.bfloat16)
    operands = {"q": q, "k": k, "v": k, "counts": tuple(counts.values())}
    check_attention(**(operands | given | changes))


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": zeros(8, 4, 64)}, "wrong ranks"),
        ({"v": zeros(2, 15, 2, 64)}, "unequal k and v"),
        ({"q": zeros(3, 8, 4, 64)}, "batch or head size differ"),
        ({"q": zeros(2, 8, 4, 32)}, "batch or head size differ"),
        ({"q": zeros(2, 0, 4, 64)}, "empty"),
        ({"q": zeros(2, 8, 3, 64)}, "N must be a multiple of K"),
        ({"window": 4}, "pass causal=True"),
        ({"window": 0, "causal": True}, "at least 1"),
        ({"counts": {"lengths": jnp.zeros(3, jnp.int32)}}, "one a sequence"),
        ({"counts": {"query_lengths": jnp.zeros(2)}}, "integers"),
        ({"counts": {"query_starts": jnp.zeros((2, 1), jnp.int32)}}, "one a sequence"),
        ({"alibi_slopes": jnp.zeros(2)}, "one slope a query head"),
        ({"bias": zeros(1, 1, 8, 16)}, "broadcast it"),
        ({"bias": zeros(4, 8, 16)}, "broadcast it"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check(**changes)


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (zeros(22, 4, 64), {}, r"need \(at least 23, 4, 64\)"),
        (zeros(23, 2, 64), {}, "one row a difference and head"),
        (zeros(23, 256), {}, "one row a difference and head"),
        (zeros(23, 4, 64), {"shift": zeros(4)}, "one vector a query head"),
        (None, {"shift": zeros(4, 64)}, "pass both or neither"),
        (zeros(23, 4, 64), {"query_starts": jnp.zeros(2, jnp.int32)}, "true positions"),
    ],
)
def test_rows_of_differences_that_do_not_fit_are_refused(rows, changes, message):
    given = {"query_starts": None, "shift": None} | changes
    with pytest.raises(ValueError, match=message):
        check_relative(zeros(2, 8, 4, 64), zeros(2, 16, 2, 64), rows=rows, **given)


def test_rows_of_differences_that_are_not_met_are_not_read():
    args, terms = operands(shape(16, 24, relative=True), dtype=jnp.float32)
    more = jnp.pad(terms["relative_rows"], ((0, 9), (0, 0), (0, 0)), constant_values=jnp.nan)
    actual = attention(*args, **terms | {"relative_rows": more}, implementation="xla")
    assert_close(actual, attention_reference(*args, **terms), reduction=24 * 32)


def test_mixed_dtypes_are_refused():
    with pytest.raises(TypeError, match="share one floating dtype"):
        check(q=zeros(2, 8, 4, 64, dtype=jnp.float16))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_scale_that_is_not_positive_is_refused(scale):
    args, _ = operands(shape(8, 8))
    with pytest.raises(ValueError, match="a positive number"):
        attention(*args, scale=scale)


def test_budget_above_the_device_is_refused():
    args, _ = operands(shape(8, 8))
    with pytest.raises(ValueError, match="the device has 132 SMs"):
        attention(*args, sm_budget=133)


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (shape(8, 8), jnp.float32, "WGMMA takes float16 and bfloat16"),
        (shape(8, 8, h=264), jnp.bfloat16, "from 32 to 256"),
        (shape(8, 8, h=44), jnp.bfloat16, "multiples of 8"),
        (shape(8, 12, bias_batch=1), jnp.bfloat16, "multiples of 8"),
        (shape(8, 8, h=136, relative=True), jnp.bfloat16, "by difference up to 128 fit"),
    ],
)
def test_named_kernel_says_what_it_cannot_do(case, dtype, message):
    args, terms = operands(case, dtype=dtype)
    with pytest.raises(NotImplementedError, match=message):
        attention(*args, **terms, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"consumers": 4}, "share the registers"),
        ({"block_kv": 96}, "multiple of 64"),
        ({"block_kv": 320}, "up to 256"),
        ({"depth": 0}, "at least 1"),
        ({"query_slots": 3}, "1 or 2"),
    ],
)
def test_tile_beyond_the_hardware_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Tile(**fields)


def test_tile_that_does_not_fit_shared_memory_is_refused():
    args, terms = operands(shape(64, 64, h=128))
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        mosaic_gpu.attention(*args, **terms, sms=1, tile=Tile(depth=4))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [case.name for case in [*MODELS, *RAGGED]])
def test_kernel_on_the_gpu_is_right_and_repeats(name):
    args, terms = operands(BY_NAME[name])
    run = jax.jit(functools.partial(attention, **terms, implementation="mosaic_gpu"))
    first = run(*args)
    assert_right(first, args, terms)
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(run(*args)), np.asarray(first))
