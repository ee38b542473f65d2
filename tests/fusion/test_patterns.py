"""Fusion of ten models, each written in another way, and of the parts that patterns are made of."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from pallas_kernels.operation import PRIMITIVE
from pallas_kernels.testing import assert_close
from pbjax.errors import FusionError, InputError, InputTypeError
from pbjax.fusion import PATTERNS, fuse, hoist, selection_of, verify
from tests import networks, user_models
from tests.fusion_graphs import H200, fused, kernels, run, traced
from tests.jobs import check_house_form
from tests.user_models import D, F, normal, tokens


@cache
def case_of(make):
    """A user's model, its graph and weights, and what fusion makes of it."""
    case = make()
    graph, weights = traced(case.model, *case.inputs, variables=case.variables)
    with use_abstract_mesh(H200):
        return case, graph, weights, fuse(graph)


def test_each_pattern_can_be_switched_off():
    _, graph, _, fusion = case_of(user_models.bfloat16_llama)
    found = {m.pattern for m in fusion.matches}
    assert found == {"attention", "gated_gemm", "gemm", "rms_norm", "qkv"}
    with use_abstract_mesh(H200):
        for pattern in found:
            rest = fuse(graph, set(PATTERNS) - {pattern})
            assert pattern not in {m.pattern for m in rest.matches}
    assert fuse(graph, "none").graph is graph


@pytest.mark.parametrize(
    ("wanted", "patterns", "without", "auto"),
    [
        ("auto", PATTERNS, (), True),
        ("all", PATTERNS, (), False),
        ("none", (), (), False),
        ((), (), (), False),
        ("qkv, gemm", ("qkv", "gemm"), (), False),
        ({"gemm"}, ("gemm",), (), False),
        ("-qkv", sorted(set(PATTERNS) - {"qkv"}), (), True),
        (["all", "-gemm.2", "-qkv"], sorted(set(PATTERNS) - {"qkv"}), ("gemm.2",), False),
    ],
)
def test_names_of_patterns_are_read(wanted, patterns, without, auto):
    found = selection_of(wanted)
    assert found.patterns == frozenset(patterns)
    assert (found.without, found.auto) == (frozenset(without), auto)
    assert selection_of(found) is found


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ("", InputError),
        ("all,none", InputError),
        (("auto", "gemm"), InputError),
        ("-all", InputError),
        ("-gemm.x", InputError),
        ("gemm.2", InputError),
        (None, InputTypeError),
        (True, InputTypeError),
        (3, InputTypeError),
        ((1, 2), InputTypeError),
    ],
)
def test_what_names_no_patterns_is_refused(wanted, kind):
    with pytest.raises(kind) as error:
        selection_of(wanted)
    check_house_form(error)


def test_an_unknown_pattern_is_refused_with_the_names_there_are():
    with pytest.raises(InputError, match=r"no pattern 'atention'.*attention"):
        fused(lambda x: x + 1.0, normal(0, 2, 3), patterns={"atention"})


def test_a_match_says_where_it_is():
    fusion = case_of(user_models.linen_decoder)[-1]
    (attention,) = (m for m in fusion.matches if m.pattern == "attention")
    assert "LinenDecoder" in attention.where
    assert "user_models.py" in attention.where
    kernel = next(o for o in fusion.graph.operations if o.primitive == PRIMITIVE)
    assert "LinenDecoder" in kernel.scope


def test_the_root_of_a_square_is_the_absolute_value():
    gain = normal(5, D)

    def model(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * jnp.sqrt(gain**2)

    fusion = fused(model, tokens())
    assert kernels(fusion) == {"rms_norm": 1}
    verify(fusion)


def test_a_pattern_that_is_off_is_not_reported_as_missed():
    model, x = gated_with_bias, tokens()
    assert fused(model, x).misses
    assert fused(model, x, patterns={"attention"}).misses == ()


def test_integers_and_empty_values_are_no_patterns():
    def model(x, ids):
        return x[:, :0] @ jnp.ones((D, D)) + jnp.ones((1, 1, D)), ids @ ids.T + ids[:1]

    assert fused(model, tokens(), jnp.ones((D, D), jnp.int32)).matches == ()


@pytest.mark.parametrize("make", [networks.nnx_scan, networks.linen_scan])
def test_the_body_of_a_loop_over_layers_is_fused_too(make):
    network = make(3)
    inputs = network.inputs(2)
    graph, weights = traced(network.model, *inputs, variables=network.variables)
    with use_abstract_mesh(H200):
        fusion = fuse(graph)
    (loop,) = fusion.loops
    norm = "layer_norm" if make is networks.nnx_scan else "rms_norm"
    assert {norm, "gemm(bias, residual)"} < set(kernels(loop))
    for got, want in zip(*(run(g, weights, inputs) for g in (fusion.graph, graph)), strict=True):
        assert_close(got, want, reduction=4 * D, roundings=20)


def gated_by_half(x):
    y = x @ normal(4, D, 2 * F)
    return jax.nn.silu(y[..., :F]) * y[..., F:]


def test_a_gate_that_is_half_of_a_product_is_one_kernel():
    fusion = fused(gated_by_half, tokens())
    assert kernels(fusion) == {"gated_gemm(silu)": 1}
    verify(fusion)


def gated_with_bias(x):
    y = x @ normal(4, D, F) + normal(5, 1, 1, F)
    return jax.nn.silu(y) * (x @ normal(6, D, F))


def test_a_gate_with_a_bias_is_named():
    (miss,) = fused(gated_with_bias, tokens()).misses
    assert miss.pattern == "gated_gemm"
    assert "has a bias" in miss.reason


def test_a_kernel_that_computes_something_else_is_found_by_verification():
    fusion = case_of(user_models.nnx_encoder)[-1]
    first = fusion.matches[0]

    def wrong(*operands):
        return tuple(1.01 * result for result in first.function(*operands))

    broken = replace(fusion, matches=(replace(first, function=wrong),))
    with pytest.raises(FusionError, match=r"fusion of layer_norm.1 at .*please report"):
        verify(broken)


def test_joined_weights_are_made_once():
    case, graph, weights, fusion = case_of(user_models.bfloat16_llama)
    hoisted = hoist(fusion.graph)
    for graph_, number in ((fusion.graph, 1), (hoisted.graph, 0)):
        joined = [o for o in graph_.operations if o.primitive == "concatenate"]
        assert sum(len(graph_.avals[o.outputs[0]].shape) == 2 for o in joined) == number
    prepared = hoisted.prepare([*weights, *map(jnp.asarray, graph.constants)])
    model = replace(hoisted.graph, constants=())
    for got, want in zip(
        run(model, prepared, case.inputs), run(fusion.graph, weights, case.inputs), strict=True
    ):
        assert_close(got, want, reduction=D)


def with_a_mean(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-6), mean


def returned_before_the_activation(x):
    y = x @ jnp.ones((D, D))
    return jax.nn.silu(y), y


def quick_gelu(x):
    y = x @ jnp.ones((D, D))
    return y * jax.nn.sigmoid(1.702 * y)


def unbiased_norm(x):
    x = jnp.tile(x, 8)  # 1/256 and 1/255 are nearly alike.
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True, ddof=1) + 1e-6)


def exact_product(x):
    return x + jnp.matmul(x, jnp.ones((D, D)), precision="highest")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "model",
    [
        with_a_mean,
        returned_before_the_activation,
        quick_gelu,
        unbiased_norm,
        exact_product,
    ],
)
def test_what_only_looks_like_a_pattern_is_left_alone(model, dtype):
    assert fused(model, tokens(dtype)).matches == ()


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("relu", lambda y: jnp.minimum(jax.nn.relu(y), 20.0)),
        ("gelu_tanh", lambda y: jnp.clip(jax.nn.gelu(y), -10.0, 10.0)),
    ],
)
def test_what_is_clipped_far_out_remains_clipped(name, activation):
    x, weights = 100.0 * tokens(), normal(3, D, D)
    fusion = fused(lambda x: activation(x @ weights), x)
    assert kernels(fusion) == {f"gemm({name})": 1}
    (got,) = run(fusion.graph, (), (x,))
    assert_close(got, activation(x @ weights), reduction=D)


def test_a_product_added_to_itself_is_no_residual():
    x, weights = tokens(), normal(3, D, D)
    assert fused(lambda x: (y := x @ weights) + y, x).matches == ()


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("gelu", lambda x: 0.5 * x * (1 + jax.lax.erf(x / 2**0.5))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + jnp.tanh(0.7978846 * (x + 0.044715 * x**3)))),
        ("silu", lambda x: x / (1 + jnp.exp(-x))),
        ("relu", lambda x: jnp.where(x > 0, x, 0)),
        ("sigmoid", lambda x: 0.5 * (jnp.tanh(x / 2) + 1)),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_activations_are_known_by_their_values(name, activation, dtype):
    weights = normal(3, D, D, dtype=dtype)
    fusion = fused(lambda x: activation(x @ weights).astype(dtype), tokens(dtype))
    assert kernels(fusion) == {f"gemm({name})": 1}


def in_float32(x):
    y = jnp.matmul(x, normal(3, D, F, dtype=x.dtype), preferred_element_type=jnp.float32)
    return y + normal(4, F)


def gated_in_float32(x):
    gate, up = (
        jnp.matmul(x, normal(seed, D, F, dtype=x.dtype), preferred_element_type=jnp.float32)
        for seed in (3, 4)
    )
    return jax.nn.silu(gate) * up


@pytest.mark.parametrize("model", [in_float32, gated_in_float32])
def test_a_result_that_keeps_more_digits_than_the_kernel_gives_is_left_with_the_reason(model):
    x = tokens(jnp.bfloat16)
    fusion = fused(model, x)
    assert fusion.matches == ()
    reason = "its result stays float32, which the kernel would round to bfloat16"
    assert {miss.reason for miss in fusion.misses} == {reason}

    def narrowed(x):
        return model(x).reshape(-1, F).astype(x.dtype)

    fusion = fused(narrowed, x)
    assert len(fusion.matches) == 1
    assert fusion.misses == ()
    verify(fusion)


def test_products_of_one_input_are_not_joined_where_each_would_keep_more_digits():
    def model(x):
        weights = (normal(seed, D, D, dtype=x.dtype) for seed in (3, 4))
        return [jnp.matmul(x, w, preferred_element_type=jnp.float32) for w in weights]

    assert fused(model, tokens(jnp.bfloat16)).matches == ()
