"""Attention over packed sequences on three layers: interpreter, lowering, SASS."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.attention import (
    attention_packed,
    attention_packed_reference,
    attention_reference,
    items,
    mosaic_gpu,
)
from pallas_kernels.attention.api import check_attention_packed
from pallas_kernels.attention.shapes import PACKED, PACKED_RAGGED
from pallas_kernels.attention.tile import Problem, Tile
from pallas_kernels.testing import assert_close
from tests import kernel_layers
from tests.cases import long_but
from tests.kernels_aot_process import ptxas_reports

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))


def operands(rows, n=1, k=1, h=64, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (rows, m, h), dtype) for key, m in zip(keys, (n, k, k), strict=True)
    ]


def interpreted(args, offsets, tile=None, **terms):
    """The kernel's result on two CTAs in the interpreter, which must see no race."""
    terms = {"causal": False, "window": None, "alibi_slopes": None} | terms

    def run(q, k, v, offsets):
        return mosaic_gpu.attention_packed(
            q, k, v, offsets=offsets, scale=q.shape[-1] ** -0.5, **terms, sms=2,
            tile=tile or Tile(block_kv=64), interpret=True,
        )  # fmt: skip

    return kernel_layers.interpreted(run, *args, jnp.array(offsets, jnp.int32))


def expected(args, offsets, **terms):
    scale = args[0].shape[-1] ** -0.5
    return attention_packed_reference(*args, jnp.array(offsets), scale=scale, **terms)


INTERPRETED = {
    "sequences that share groups of eight rows": ([0, 5, 5, 77, 79, 160], {}, {}),
    "rows beyond the last sequence, in no multiple of 8": ([0, 67, 131], {}, {}),
    "causal with a window over two tiles": ([0, 3, 150], {}, {"causal": True, "window": 70}),
    "causal, grouped, alibi, one slot": (
        [0, 70, 136],
        {"n": 2},
        {"causal": True, "alibi_slopes": jnp.array([0.5, 0.1]), "tile": Tile(query_slots=1)},
    ),
}


@pytest.mark.parametrize("name", long_but(INTERPRETED, "causal, grouped, alibi, one slot"))
def test_interpreted_kernel_is_right_and_free_of_races(name):
    offsets, heads, terms = INTERPRETED[name]
    args = operands(offsets[-1] + 3, **heads)
    actual = interpreted(args, offsets, **terms)
    terms.pop("tile", None)
    assert_close(actual, expected(args, offsets, **terms), reduction=offsets[-1], roundings=1)
    assert not np.any(np.asarray(actual[offsets[-1] :], np.float32))


@pytest.mark.long
def test_reference_is_that_of_each_sequence_alone():
    args, offsets = operands(60, n=2), [0, 7, 7, 40, 60]
    terms = {"causal": True, "window": 9, "alibi_slopes": jnp.array([0.5, 0.1])}
    actual = expected(args, offsets, **terms)
    for a, b in ((0, 7), (7, 40), (40, 60)):
        alone = attention_reference(*(x[None, a:b] for x in args), scale=64**-0.5, **terms)[0]
        np.testing.assert_allclose(actual[a:b], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_xla_agrees_with_the_reference(causal):
    args, offsets = operands(60, n=2, dtype=jnp.float32), jnp.array([0, 7, 7, 40, 57])
    terms = {"causal": causal, "alibi_slopes": jnp.array([0.5, 0.1])}
    actual = attention_packed(*args, offsets, **terms, implementation="xla")
    assert_close(actual, expected(args, offsets, **terms), reduction=60 * 64)


def test_offsets_that_fall_or_exceed_the_rows_are_the_nearest_that_do_not():
    args = operands(60)
    given, meant = jnp.array([3, 40, 20, 99]), jnp.array([0, 40, 40, 60])
    actual, right = (attention_packed(*args, x, implementation="xla") for x in (given, meant))
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(right, np.float32))


def problem(rows, causal=False):
    return Problem(
        batch_size=1, num_queries=rows, num_keys=rows, num_heads=1, num_kv_heads=1, head_dim=64,
        scale=1.0, causal=causal, packed=True,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_tiles_hold_each_row_once_and_those_with_most_keys_come_first(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 300, random.integers(1, 30)) * random.integers(0, 2)
    starts, tile = np.cumsum(lengths) - lengths, Tile()
    rows = int(-(-sum(lengths) // 8) * 8) or 8
    table = items.pack(problem(rows, causal=True), tile, starts, lengths, lengths)
    traced = jax.jit(lambda *x: items.pack(problem(rows, causal=True), tile, *x))
    np.testing.assert_array_equal(table, traced(starts, lengths, lengths))

    held, steps = np.zeros(rows, int), []
    tiles = table[1:].reshape(-1, 4)
    assert table[0] <= len(tiles)
    for row, start, end, key_end in tiles[: table[0]]:
        assert key_end == end
        first = start // 8 * 8 + row
        held[max(first, start) : min(first + tile.block_q, end)] += 1
        steps.append(-(-(min(first + tile.block_q, end) - start // 8 * 8) // tile.block_kv))
    assert np.all(held[: sum(lengths)] == 1)
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("case", long_but([*PACKED, *PACKED_RAGGED]), ids=lambda case: case.name)
def test_every_shape_lowers_to_one_kernel_of_its_name(case):
    def run(q, k, v, offsets, slopes):
        return attention_packed(
            q, k, v, offsets, causal=case.causal, window=case.window, alibi_slopes=slopes,
            implementation="mosaic_gpu",
        )  # fmt: skip

    args = jax.eval_shape(
        lambda: operands(case.num_rows, case.num_heads, case.num_kv_heads, case.head_dim)
    )
    slopes = jax.ShapeDtypeStruct((case.num_heads,), jnp.float32) if case.alibi else None
    offsets = jax.ShapeDtypeStruct(case.offsets.shape, jnp.int32)
    with use_abstract_mesh(H200):
        traced = jax.jit(run).trace(*args, offsets, slopes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert "pbjax_attention" in text


@pytest.mark.long
def test_shapes_compile_without_serialised_products():
    reports = ptxas_reports([case.name for case in [*PACKED, *PACKED_RAGGED]])
    assert not [name for name, report in reports.items() if report["codes"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((1, 8, 2, 64))}, "wrong ranks"),
        ({"q": jnp.zeros((9, 2, 64))}, "9 and 8 tokens"),
        ({"q": jnp.zeros((8, 3, 64))}, "N must be a multiple of K"),
        ({"offsets": jnp.zeros(3)}, "integers"),
        ({"offsets": jnp.zeros(1, jnp.int32)}, "number of sequences"),
        ({"offsets": jnp.zeros((2, 2), jnp.int32)}, "number of sequences"),
        ({"window": 4}, "pass causal=True"),
        ({"alibi_slopes": jnp.zeros(3)}, "one slope a query head"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    x = jnp.zeros((8, 2, 64))
    given = {"q": x, "k": x, "v": x, "offsets": jnp.array([0, 8])}
    given |= {"window": None, "causal": False, "alibi_slopes": None}
    with pytest.raises(ValueError, match=message):
        check_attention_packed(**given | changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"scale": -1.0}, "a positive number"), ({"sm_budget": 133}, "the device has 132 SMs")],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attention_packed(*operands(8), jnp.array([0, 8]), **options)


def test_named_kernel_says_what_it_cannot_do():
    args = operands(8, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match=r"attention_packed.*WGMMA takes float16"):
        attention_packed(*args, jnp.array([0, 8]), implementation="mosaic_gpu")
