"""Decode attention on three layers: the interpreter with its race detector, lowering, and SASS."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.decode_attention import (
    decode_attention,
    decode_attention_reference,
    mosaic_gpu,
)
from pallas_kernels.decode_attention.api import check_decode_attention
from pallas_kernels.decode_attention.shapes import MODELS, RAGGED, SHAPES, DecodeShape
from pallas_kernels.decode_attention.splits import LEAST_KEYS, STREAMS, choose_splits
from pallas_kernels.testing import assert_close
from tests import kernel_layers
from tests.cases import long_but
from tests.kernels_aot_process import ptxas_reports

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
SMALL = mosaic_gpu.Tile(block_kv=64, depth=2)
BY_NAME = {case.name: case for case in SHAPES}


def shape(s, *, n=4, k=2, h=64, batch_size=2, **terms):
    return DecodeShape(
        name="test",
        batch_size=batch_size,
        num_keys=s,
        num_heads=n,
        num_kv_heads=k,
        head_dim=h,
        **terms,
    )


def operands(case, *, dtype=jnp.bfloat16, lengths=None):
    """Random q, k, v and lengths of a shape, and its terms; pages lie anywhere in their pool."""
    keys = jax.random.split(jax.random.key(0), 5)
    b, s, n, h = case.batch_size, case.num_keys, case.num_heads, case.head_dim
    cache, terms = (b, s, case.num_kv_heads, h), {}
    if case.page_size:
        pages = s // case.page_size
        pool = b * pages + 3
        table = jax.random.permutation(keys[4], pool)[: b * pages].reshape(b, pages)
        terms["page_table"] = table.astype(jnp.int32)
        cache = (pool, case.page_size, case.num_kv_heads, h)
    if case.alibi:
        terms["alibi_slopes"] = 2.0 ** (-8 * (jnp.arange(n, dtype=jnp.float32) + 1) / n)
    q = jax.random.normal(keys[0], (b, case.num_tokens, n, h), dtype)
    k, v = (jax.random.normal(key, cache, dtype) for key in keys[1:3])
    if lengths is not None:
        lengths = jnp.array(lengths, jnp.int32)
    elif case.full:
        lengths = jnp.full(b, s, jnp.int32)
    else:
        lengths = jax.random.randint(keys[3], (b,), 0, s + 1)
    return (q, k, v, lengths), terms


def interpreted(args, terms, **options):
    """The kernel's result on one CTA in the interpreter, which must see no race."""
    given = {"page_table": None, "alibi_slopes": None, "scale": 0.125, "sms": 1, "tile": SMALL}
    run = functools.partial(
        mosaic_gpu.decode_attention, **(given | terms | options), interpret=True
    )
    return kernel_layers.interpreted(run, *args)


def assert_right(actual, args, terms, scale=0.125):
    """The weights are rounded once before they meet the values."""
    expected = decode_attention_reference(*args, **terms, scale=scale)
    num_keys = args[1].shape[1] * (terms["page_table"].shape[1] if "page_table" in terms else 1)
    assert_close(actual, expected, reduction=num_keys, roundings=1)


INTERPRETED = {
    "last tile not full": (shape(136), {"splits": 1}, [130, 3]),
    "lengths out of range": (shape(72, n=2, k=1), {"splits": 1}, [2**30, -7]),
    "split, one without keys, alibi": (shape(136, alibi=True), {"splits": 2}, [130, 0]),
    "three tokens, fewer keys than tokens": (
        shape(72, num_tokens=3, batch_size=3, n=4, k=1),
        {"splits": 1},
        [70, 2, 0],
    ),
    "softcap, two tokens, alibi, split": (
        shape(136, num_tokens=2, n=2, k=1, alibi=True, softcap=0.5),
        {"splits": 2},
        [130, 66],
    ),
    "small pages": (shape(128, page_size=16), {"splits": 1}, [128, 17]),
    "large pages, split": (shape(256, page_size=128, n=2, k=1), {"splits": 2}, [256, 65]),
}


@pytest.mark.parametrize("name", long_but(INTERPRETED, "small pages"))
def test_interpreted_kernel_is_right_and_free_of_races(name):
    case, options, lengths = INTERPRETED[name]
    args, terms = operands(case, lengths=lengths)
    terms["softcap"] = case.softcap
    assert_right(interpreted(args, terms, **options), args, terms)


def test_a_part_of_the_sequences_is_attended_to_where_the_cache_lies():
    (q, k, v, lengths), terms = operands(shape(72, batch_size=3, alibi=True), lengths=[9, 70, 0])
    whole = decode_attention_reference(q, k, v, lengths, **terms, scale=0.125)
    part = q[1:], k, v, lengths[1:]
    by_kernel = interpreted(part, terms | {"first_sequence": 1}, splits=1)
    by_xla = decode_attention(*part, **terms, scale=0.125, first_sequence=1, implementation="xla")
    for actual in (by_kernel, by_xla):
        assert_close(actual, whole[1:], reduction=72, roundings=3)


@pytest.mark.long
def test_pages_beyond_a_length_may_be_anything():
    args, terms = operands(shape(128, page_size=64, batch_size=1, n=2, k=1), lengths=[64])
    wild = {"page_table": terms["page_table"].at[0, 1].set(2**30)}
    np.testing.assert_array_equal(
        np.asarray(interpreted(args, wild, splits=1), np.float32),
        np.asarray(interpreted(args, terms, splits=1), np.float32),
    )


@pytest.mark.parametrize(
    "case",
    [
        shape(72, num_tokens=3, alibi=True, full=False),
        shape(64, num_tokens=2, page_size=16, full=False),
        shape(64, num_tokens=2, full=False, softcap=0.5, alibi=True),
    ],
)
def test_xla_agrees_with_the_reference(case):
    args, terms = operands(case, dtype=jnp.float32)
    terms["softcap"] = case.softcap
    actual = decode_attention(*args, **terms, scale=0.125, implementation="xla")
    expected = decode_attention_reference(*args, **terms, scale=0.125)
    assert_close(actual, expected, reduction=case.num_keys * case.head_dim)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32])
def test_lengths_beyond_the_cache_are_clipped_to_it(dtype):
    args, _ = operands(shape(128, num_tokens=2, batch_size=3, n=2, k=1), lengths=[1, 0, 127])
    q, k, v, lengths = args
    whole = decode_attention(q, k[:, :72], v[:, :72], jnp.array([1, 0, 72], jnp.int32))
    found = decode_attention(q, k[:, :72], v[:, :72], lengths.astype(dtype))
    assert (found == whole).all()


def test_default_is_xla_without_a_gpu():
    args, terms = operands(shape(16))
    text = jax.jit(functools.partial(decode_attention, **terms)).lower(*args).as_text()
    assert "mosaic_gpu" not in text


def lowered(case, **options):
    args, terms = jax.eval_shape(lambda: operands(case))

    def run(args, terms):
        fixed = {"softcap": case.softcap, "implementation": "mosaic_gpu", **options}
        return decode_attention(*args, **terms, **fixed)

    with use_abstract_mesh(H200):
        return jax.jit(run).trace(args, terms).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", long_but(BY_NAME))
def test_every_shape_lowers_to_one_kernel_of_its_name(name):
    text = lowered(BY_NAME[name])
    assert text.count("@mosaic_gpu_v2") == 1
    assert "pbjax_decode_attention" in text


@pytest.mark.parametrize(("budget", "grid"), [(132, 128), (48, 48), (47, 47)])
def test_grid_is_the_least_that_takes_as_many_rounds_as_the_budget(budget, grid):
    """4,096 heads over two streams an SM: 16 rounds take 128 SMs, 43 take 48, 44 take 47."""
    args, terms = jax.eval_shape(lambda: operands(BY_NAME["llama3-8b 512x1024"]))
    run = functools.partial(decode_attention, implementation="mosaic_gpu", sm_budget=budget)
    with use_abstract_mesh(H200):
        jaxpr = str(jax.make_jaxpr(run)(*args, **terms))
    assert f"'sm': {grid}" in jaxpr or f"grid=({grid}" in jaxpr


def test_one_long_sequence_is_split_over_all_streams():
    case = BY_NAME["one sequence"]
    assert choose_splits(case.num_kv_heads, case.num_keys, 132) == 32


def test_parts_have_two_tiles_and_many_sequences_are_not_split():
    tile = mosaic_gpu.Tile()
    assert (tile.streams, 2 * tile.block_kv) == (STREAMS, LEAST_KEYS)
    assert [choose_splits(8, keys, 132) for keys in (256, 257, 1024)] == [1, 2, 4]
    assert choose_splits(264, 32768, 132) == choose_splits(4096, 32768, 132) == 1


@pytest.mark.long
def test_models_compile_without_spills_or_serialised_products():
    reports = ptxas_reports([f"decode {case.name}" for case in MODELS])
    assert not [name for name, report in reports.items() if report["spilled"]]
    codes = {code for report in reports.values() for code in report["codes"]}
    assert not codes & {"C7511", "C7512", "C7513"}


def check(**changes):
    given = {
        "q": jnp.zeros((2, 1, 4, 64), jnp.bfloat16),
        "k": jnp.zeros((2, 16, 2, 64), jnp.bfloat16),
        "v": jnp.zeros((2, 16, 2, 64), jnp.bfloat16),
        "lengths": jnp.zeros(2, jnp.int32),
        "page_table": None,
        "alibi_slopes": None,
    }
    check_decode_attention(**(given | changes))


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": zeros(2, 4, 64)}, "wrong ranks"),
        ({"v": zeros(2, 8, 2, 64)}, "unequal k and v"),
        ({"q": zeros(3, 1, 4, 64)}, "q has 3 sequences, the cache 2"),
        ({"first_sequence": 1}, "q has 2 sequences, the cache 2"),
        ({"first_sequence": -1}, "q's must be among them"),
        (
            {"page_table": jnp.zeros((2, 1), jnp.int32), "first_sequence": 1},
            "with a page table",
        ),
        ({"q": zeros(2, 1, 4, 128)}, "head sizes differ"),
        ({"q": zeros(2, 1, 5, 64)}, "N must be a multiple of K"),
        ({"q": zeros(2, 17, 4, 64)}, "room for 16 keys"),
        ({"lengths": jnp.zeros((2, 1), jnp.int32)}, "one a sequence"),
        ({"lengths": jnp.zeros(2)}, "integers"),
        ({"page_table": jnp.zeros((3, 1), jnp.int32)}, "one row a sequence"),
        ({"page_table": jnp.zeros((2, 1))}, "integers"),
        ({"alibi_slopes": jnp.zeros(2)}, "one slope a query head"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check(**changes)


def test_mixed_dtypes_are_refused():
    with pytest.raises(TypeError, match="share one floating dtype"):
        check(q=zeros(2, 1, 4, 64, dtype=jnp.float16))


@pytest.mark.parametrize("softcap", [0.0, -3.0, float("nan"), float("inf")])
def test_softcap_that_is_not_positive_and_finite_is_refused(softcap):
    args, terms = operands(shape(16))
    with pytest.raises(ValueError, match=r"softcap=.*a positive finite number"):
        decode_attention(*args, **terms, softcap=softcap)


def test_budget_above_the_device_is_refused():
    args, terms = operands(shape(16))
    with pytest.raises(ValueError, match="the device has 132 SMs"):
        decode_attention(*args, **terms, sm_budget=200)


@pytest.mark.parametrize(
    ("case", "dtype", "message"),
    [
        (shape(16), jnp.float32, "WGMMA takes float16 and bfloat16"),
        (shape(16, h=80), jnp.bfloat16, "64, 128, 192 and 256 fit"),
        (shape(12), jnp.bfloat16, "a multiple of 8"),
        (shape(48, page_size=12), jnp.bfloat16, "choose another page size"),
        (shape(96, page_size=48), jnp.bfloat16, "choose another page size"),
        (shape(64, num_tokens=17), jnp.bfloat16, "at most 32"),
    ],
)
def test_named_kernel_says_what_it_cannot_do(case, dtype, message):
    args, terms = operands(case, dtype=dtype)
    with pytest.raises(NotImplementedError, match=message):
        decode_attention(*args, **terms, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"streams": 5}, "at most eight warpgroups"),
        ({"block_kv": 96}, "multiple of 64"),
        ({"depth": 1}, "at least 2"),
        ({"depth": 17}, "at most 32"),
    ],
)
def test_tile_beyond_the_hardware_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        mosaic_gpu.Tile(**fields)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [case.name for case in [MODELS[0], *RAGGED]])
def test_kernel_on_the_gpu_is_right_and_repeats(name):
    args, terms = operands(BY_NAME[name])
    run = functools.partial(decode_attention, scale=0.125, implementation="mosaic_gpu")
    first = jax.jit(run)(*args, **terms)
    assert_right(first, args, terms)
    for _ in range(5):
        again = jax.jit(run)(*args, **terms)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(first))
