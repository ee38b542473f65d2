"""A kernel as one operation of a traced program, and the contexts that choose for kernels."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import dispatch
from pallas_kernels.attention import attention, attention_packed
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gemm import gemm
from pallas_kernels.norm import rms_norm
from pallas_kernels.operation import PRIMITIVE, arguments_of, as_operation
from pallas_kernels.testing import assert_close
from tests.cases import long_but

H200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))


def operands(rows=64, dtype=jnp.bfloat16):
    x, w = (
        jax.random.normal(key, (rows, 64), dtype) for key in jax.random.split(jax.random.key(0))
    )
    return x, w[:64]


def primitives(f, *args):
    with use_abstract_mesh(H200):
        return [equation.primitive.name for equation in jax.make_jaxpr(f)(*args).eqns]


def lowered(f, *args, platform="cuda"):
    with use_abstract_mesh(H200):
        return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def test_on_a_hopper_gpu_a_kernel_is_one_operation_that_launches_it():
    assert primitives(gemm, *operands()) == [PRIMITIVE]
    assert "mosaic_gpu" in lowered(gemm, *operands())


def test_elsewhere_the_operation_is_what_it_means():
    assert "mosaic_gpu" not in lowered(gemm, *operands(), platform="cpu")
    assert PRIMITIVE not in str(jax.make_jaxpr(gemm)(*operands()))


def test_what_no_kernel_can_do_is_an_operation_too_so_that_programs_of_all_shapes_are_alike():
    odd = operands(dtype=jnp.float32)
    assert primitives(gemm, *odd) == [PRIMITIVE]
    assert "mosaic_gpu" not in lowered(gemm, *odd)


def test_an_operation_has_the_values_of_its_plain_form():
    x, w = operands()

    def f(x, w):
        return as_operation("twice", lambda: (x @ w, x), lambda: (jnp.matmul(x, w), x), {})

    for run in (f, jax.jit(f)):
        product, same = run(x, w)
        assert_close(product, x.astype(jnp.float32) @ w.astype(jnp.float32), reduction=64)
        assert (same == x).all()


def test_an_operation_keeps_the_arguments_of_the_public_function():
    x, w = operands()
    with use_abstract_mesh(H200):
        (equation,) = jax.make_jaxpr(lambda x, w: gemm(x, w, activation="silu"))(x, w).eqns
    arguments = arguments_of(equation.params, ["x", "w"])
    expected = {"x": "x", "w": "w", "bias": None, "residual": None}
    assert arguments == expected | {"activation": "silu", "scale": 1.0}


def test_an_operation_maps_over_a_new_axis():
    x, w = operands(rows=192)
    batches = x.reshape(3, 64, 64)

    def f(x):
        return as_operation("product", lambda: x @ w, lambda: jnp.matmul(x, w), {"x": x})

    got = jax.jit(jax.vmap(f, in_axes=1, out_axes=1))(batches.swapaxes(0, 1))
    assert_close(got.swapaxes(0, 1).reshape(192, 64), (x @ w).astype(jnp.float32), reduction=64)


def test_a_kernel_and_its_meaning_must_agree_in_shape():
    x, _ = operands()
    with pytest.raises(AssertionError, match="odd: the kernel gives"):
        jax.make_jaxpr(lambda x: as_operation("odd", lambda: x, lambda: x.sum(), {}))(x)


def test_contexts_choose_where_a_call_does_not_and_jit_traces_anew():
    x, w = operands()
    f = jax.jit(gemm)
    with dispatch.default_implementation("mosaic_gpu"), dispatch.default_sm_budget(7):
        seven = lowered(f, x, w)
    with dispatch.default_implementation("mosaic_gpu"):
        every = lowered(f, x, w)
    with dispatch.default_implementation("xla"):
        plain = lowered(f, x, w)
    assert seven != every
    assert ["mosaic_gpu" in text for text in (seven, every, plain)] == [True, True, False]


def test_a_budget_from_the_context_is_checked():
    over = pytest.raises(ValueError, match="132 SMs")
    with use_abstract_mesh(H200), dispatch.default_sm_budget(200), over:
        jax.make_jaxpr(gemm)(*operands())


def test_a_call_that_names_an_implementation_or_budget_is_not_overruled():
    with use_abstract_mesh(H200), dispatch.default_implementation("mosaic_gpu"):
        assert "mpmd_map" not in str(
            jax.make_jaxpr(lambda x, w: gemm(x, w, implementation="xla"))(*operands())
        )
    with dispatch.default_sm_budget(7), use_abstract_mesh(H200):
        assert dispatch.check_sm_budget("gemm", 9) == 9
        assert dispatch.check_sm_budget("gemm", None) == 7


def hashes(text):
    """Of the kernels in a program, as jax makes them of their code."""
    return re.findall(r'kernel_hash = "([^"]*)"', text)


def multiply(x):
    return gemm(x, x)


def attend(x):
    return attention(*[x.reshape(1, 64, 1, 64)] * 3, causal=True).reshape(64, 64)


def attend_packed(x):
    return attention_packed(*[x[:, None]] * 3, offsets=jnp.array([0, 64]), causal=True)[:, 0]


def attend_to_cache(x):
    q, cache = x.reshape(1, 1, 64, 64)[:, :, :8], x.reshape(1, 64, 1, 64)
    return x.at[:8].set(decode_attention(q, cache, cache, jnp.array([64]))[0, 0])


def normalise(x):
    return rms_norm(x, x[0], eps=1e-5)


KERNELS = [multiply, normalise, attend, attend_packed, attend_to_cache]


@pytest.mark.long
@pytest.mark.parametrize("kernel", long_but(KERNELS))
def test_equal_launches_are_lowered_once_whatever_was_lowered_before(kernel):
    x, _ = operands()

    def other_layers(x):
        with jax.named_scope("first"):
            y = kernel(x + 1)
        return kernel(y) * kernel(y + 1)

    (alone,) = hashes(lowered(kernel, x))
    jax.clear_caches()
    assert hashes(lowered(other_layers, x)) == [alone]
