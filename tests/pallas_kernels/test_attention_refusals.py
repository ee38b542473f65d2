"""What the attention functions refuse, and how they say so."""

import jax.numpy as jnp
import pytest

from pallas_kernels.attention import attention, mosaic_gpu
from pallas_kernels.attention.api import check_attention, check_key_bias, check_relative
from pallas_kernels.attention.tile import Tile
from tests.attention_calls import operands, shape, zeros


def check(counts=None, **changes):
    given = dict.fromkeys(("window", "alibi_slopes", "bias")) | {"causal": False}
    counts = {"lengths": None, "query_lengths": None, "query_starts": None} | (counts or {})
    q = jnp.zeros((2, 8, 4, 64), jnp.bfloat16)
    k = jnp.zeros((2, 16, 2, 64), jnp.bfloat16)
    operands = {"q": q, "k": k, "v": k, "counts": tuple(counts.values())}
    check_attention(**(operands | given | changes))


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


@pytest.mark.parametrize("softcap", [0.0, -3.0, float("nan"), float("inf")])
def test_softcap_that_is_not_positive_and_finite_is_refused(softcap):
    args, _ = operands(shape(8, 8))
    with pytest.raises(ValueError, match=r"softcap=.*a positive finite number"):
        attention(*args, softcap=softcap)


@pytest.mark.parametrize(
    ("key_bias", "kind", "message"),
    [
        (jnp.zeros((1, 9)), ValueError, "one a key of each sequence"),
        (jnp.zeros((1, 1, 8)), ValueError, "one a key of each sequence"),
        (jnp.ones((1, 8), bool), ValueError, "floats"),
        ([[0.0] * 8], TypeError, "an array"),
    ],
)
def test_bias_by_key_that_does_not_fit_is_refused(key_bias, kind, message):
    with pytest.raises(kind, match=message):
        check_key_bias(zeros(1, 8, 1, 32), zeros(1, 8, 1, 32), key_bias)
