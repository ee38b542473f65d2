"""Rooflines of small programs: what moves, what is counted, how it is grouped, what is refused."""

import json
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pbjax
from pallas_kernels.attention import attention as kernel
from pallas_kernels.gemm import gemm
from pbjax.device import ResourceClass, find_device
from pbjax.errors import DeviceError, InputError, ModelError
from pbjax.graph.cost import equation_cost, total_cost
from pbjax.graph.functional import functional
from pbjax.graph.trace import trace
from pbjax.roofline.points import Traffic
from pbjax.roofline.report import roofline_report
from tests.networks import NETWORKS

H200 = find_device("NVIDIA H200")
TARGET = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
B, T, N, H, S = 2, 16, 4, 8, 32
D = N * H


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def moves(**parts):
    return Traffic(**{name: float(amount) for name, amount in parts.items()})


def report(function, *inputs, **options):
    return roofline_report(function, *inputs, device=H200, **options)


@cache
def of_network(name):
    network = NETWORKS[name](3)
    return report(network.model, *network.inputs(4), variables=network.variables), network


def with_weights(function, *weights):
    """An nnx module that calls function(weights, ...)."""

    class Model(nnx.Module):
        def __init__(self):
            self.weights = nnx.List([nnx.Param(w) for w in weights])

        def __call__(self, *inputs):
            return function([w[...] for w in self.weights], *inputs)

    return nnx.eval_shape(Model)


def attention(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * H**-0.5, axis=-1).astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def attended(**options):
    return report(attention, *[spec(B, T, N, H)] * 3, **options)


def test_public_name():
    assert pbjax.roofline_report is roofline_report


def test_a_matrix_product_reads_its_operands_and_writes_its_result_once():
    weight = jnp.zeros((D, 3 * D), jnp.bfloat16)
    found = report(with_weights(lambda w, x: x @ w[0], weight), spec(B * T, D))
    (point,) = found.points
    assert point.flops == 2 * B * T * D * 3 * D
    assert point.traffic == moves(weights=2 * 3 * D * D, activations=2 * B * T * (D + 3 * D))
    assert (point.kind, point.dtype) == ("dense", "bfloat16")
    assert point.memory_s == point.traffic.total / H200.memory_bytes_per_s
    assert point.tensor_s == point.flops / H200.tensor_flops_per_s["bfloat16"]
    assert found.total.intensity == point.flops / point.traffic.total


def test_a_chain_reads_once_and_writes_once():
    found = report(lambda x: jnp.tanh(jnp.exp(x) + x) * x, spec(B, D, dtype=jnp.float32))
    assert found.total.traffic == moves(activations=2 * 4 * B * D)
    assert found.memory.temporary_bytes == 4 * B * D


def test_a_value_is_written_where_a_product_lies_between_two_readers():
    def residual(w, x):
        y = jnp.tanh(x)
        return y + y @ w[0]

    found = report(with_weights(residual, jnp.zeros((D, D))), spec(B * T, D, dtype=jnp.float32))
    rows = 4 * B * T * D
    chains = sum((p.traffic for p in found.points if p.kind == "other"), Traffic())
    # x read and y written; then y and the product read and the sum written.
    assert chains == moves(activations=5 * rows)


def test_views_broadcasts_and_transpositions_move_nothing():
    def model(w, x):
        y = (x @ w[0]).reshape(B, T, N, H).transpose(0, 2, 1, 3).reshape(B, N * T, H)
        return jnp.einsum("bth,hk->btk", y, w[1])

    weights = jnp.zeros((D, D)), jnp.zeros((H, H))
    found = report(with_weights(model, *weights), spec(B, T, D, dtype=jnp.float32))
    assert all(p.traffic.total == 0 for p in found.points if p.kind == "other")


def test_a_larger_type_is_made_where_it_is_read():
    def model(x):
        return jnp.cumsum(x.astype(jnp.float32), axis=0)

    assert report(model, spec(B, D)).total.traffic == moves(activations=(2 + 4) * B * D)


def test_a_row_appended_to_many_is_written_and_read_again():
    """Its roots are smaller than it is, by a row: no reason to make it twice."""

    def model(w, x):
        y = jnp.concatenate([jnp.zeros((B, 1, D), x.dtype), x @ w[0]], axis=1)
        return y @ w[1]

    weights = jnp.zeros((D, D), jnp.bfloat16), jnp.zeros((D, D), jnp.bfloat16)
    found = report(with_weights(model, *weights), spec(B, T, D))
    (other,) = [total for total in found.kinds if total.name == "other"]
    assert other.traffic == moves(activations=2 * B * D * (T + 1 + T))


def test_a_look_up_moves_the_rows_that_it_takes():
    model = with_weights(lambda w, ids: w[0][ids], jnp.zeros((10_000, D), jnp.bfloat16))
    found = report(model, spec(B, T, dtype=jnp.int32))
    assert found.total.traffic == moves(weights=2 * B * T * D, activations=(4 + 2 * D) * B * T)


def test_a_cache_is_written_in_place():
    def model(x, cache):
        return jax.lax.dynamic_update_slice(cache, x, (0, 3, 0))

    found = report(model, spec(B, 1, D), spec(B, S, D), cache=(1,))
    assert found.total.traffic == moves(activations=2 * B * D, kv_cache=2 * B * D)
    assert found.memory.kv_cache_bytes == 2 * B * S * D
    assert found.memory.temporary_bytes == 0
    assert [p.name for p in found.points if p.traffic.kv_cache] == ["cache write"]


def test_fused_attention_moves_queries_keys_values_and_context_alone():
    (point,) = [p for p in attended().points if p.kind == "attention"]
    assert point.name == "attention"
    assert point.traffic == moves(activations=4 * 2 * B * T * D)
    contractions = 4 * B * N * T * T * H
    assert contractions < point.flops <= contractions + 8 * B * N * T * T


def test_unfused_attention_moves_its_scores():
    found = attended(attention="unfused")
    by_name = {p.name: p for p in found.points if p.kind == "attention"}
    heads, scores = 2 * B * T * D, B * N * T * T
    # Scores leave the product in f32 and enter the other in bf16; softmax reads and writes them.
    assert by_name["scores, values"].traffic.total == 4 * heads + (4 + 2) * scores
    assert by_name["softmax"].traffic.total == (4 + 2) * scores
    assert found.total.flops == attended().total.flops
    assert found.memory.temporary_bytes > attended().memory.temporary_bytes


def test_attention_over_a_cache_reads_it_once():
    found = report(attention, spec(B, 1, N, H), *[spec(B, S, N, H)] * 2, cache=(1, 2))
    (point,) = [p for p in found.points if p.kind == "attention"]
    assert point.traffic == moves(activations=2 * 2 * B * D, kv_cache=2 * 2 * B * S * D)


def test_a_kernel_is_one_dense_group():
    model = with_weights(lambda w, x: gemm(x, w[0]), jnp.zeros((D, D), jnp.bfloat16))
    with use_abstract_mesh(TARGET):
        (point,) = report(model, spec(B * T, D)).points
    assert (point.kind, point.flops) == ("dense", 2 * B * T * D * D)
    assert point.traffic == moves(weights=2 * D * D, activations=4 * B * T * D)


def test_an_attention_kernel_is_attention_whatever_it_reads():
    model = with_weights(
        lambda w, q, k, v: kernel(q, k, v, causal=True, alibi_slopes=w[0]), jnp.zeros(N)
    )
    with use_abstract_mesh(TARGET):
        (point,) = report(model, *[spec(B, T, N, 32)] * 3).points
    assert (point.kind, point.name) == ("attention", "attention")
    assert point.traffic.activations == 4 * 2 * B * T * N * 32


@pytest.mark.parametrize("name", NETWORKS)
def test_every_operation_is_counted(name):
    found, network = of_network(name)
    seam = functional(network.model, network.variables)
    graph = trace(seam.apply, seam.params, *network.inputs(4))
    cost = total_cost(equation_cost(operation.equation) for operation in graph.operations)
    assert found.total.flops == pytest.approx(cost.flops + cost.transcendentals, rel=1e-12)
    assert found.exact
    assert not found.unknown


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_a_scan_costs_what_a_loop_does(name):
    found = [of_network(f"{name}_{kind}")[0] for kind in ("loop", "scan")]
    assert found[0].total.flops == found[1].total.flops
    assert found[0].total.traffic.weights == found[1].total.traffic.weights
    layers = [{p.repeats for p in r.points} for r in found]
    assert layers == [{1, 3}, {1, 3}]


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_add_up(name):
    found, _ = of_network(name)
    for groups in (found.stages, found.kinds):
        assert sum(g.seconds for g in groups) == pytest.approx(found.total.seconds)
        assert sum(g.flops for g in groups) == pytest.approx(found.total.flops)
        moved = sum((g.traffic for g in groups), Traffic())
        assert moved.total == pytest.approx(found.total.traffic.total)
    assert len({(p.stage, p.name) for p in found.points}) == len(found.points)


def test_stages_of_a_model_without_scopes_are_named_by_its_modules():
    found, _ = of_network("nnx_loop")
    assert [stage.name for stage in found.stages] == ["layers", "epilogue"]
    names = ["norm", "up", "activation", "down", "elementwise"]
    assert [p.name for p in found.stages[0].points] == names
    assert [p.name for p in found.stages[1].points] == ["head", "elementwise"]


def test_a_function_of_its_weights_says_which_they_are():
    def model(weights, x):
        for layer in weights["layers"]:
            x = x + jnp.tanh(x @ layer["mlp"]["up"]) @ layer["mlp"]["down"]
        return x @ weights["head"]

    layer = {"mlp": {"up": spec(D, 2 * D), "down": spec(2 * D, D)}}
    tree = {"layers": [layer] * 3, "head": spec(D, 7)}
    found = report(model, tree, spec(B * T, D), weights=(0,))
    assert found.memory.weight_bytes == 2 * (3 * 4 * D * D + 7 * D)
    assert found.total.traffic.weights == found.memory.weight_bytes
    assert [p.name for p in found.points if p.kind == "dense"] == ["up", "down", "head"]
    assert [s.name for s in found.stages if s.repeats == 3] == ["mlp"]
    assert not [p for p in found.points if p.kind == "attention"]


def test_stages_of_linen_are_its_modules():
    found, _ = of_network("linen_loop")
    assert {"Dense_0", "Dense_1"} <= {stage.name for stage in found.stages}


@pytest.mark.parametrize(
    ("rows", "resource"), [(8, ResourceClass.MEMORY), (8192, ResourceClass.TENSOR)]
)
def test_rows_decide_what_bounds_a_product(rows, resource):
    model = with_weights(lambda w, x: x @ w[0], jnp.zeros((4096, 4096), jnp.bfloat16))
    total = report(model, spec(rows, 4096)).total
    assert total.resource == resource
    assert total.bound == ("memory" if resource == ResourceClass.MEMORY else "compute")
    above = total.intensity > H200.ridge_point("bfloat16")
    assert above == (resource == ResourceClass.TENSOR)
    roof = min(H200.tensor_flops_per_s["bfloat16"], total.intensity * H200.memory_bytes_per_s)
    assert total.attainable_flops_per_s == pytest.approx(roof)


def test_memory_counts_weights_inputs_and_what_is_alive():
    def model(w, x):
        wide = x @ w[0]
        return jnp.tanh(wide) @ w[1]

    weights = jnp.zeros((D, 8 * D), jnp.bfloat16), jnp.zeros((8 * D, D), jnp.bfloat16)
    memory = report(with_weights(model, *weights), spec(B * T, D)).memory
    assert memory.weight_bytes == 2 * 16 * D * D
    assert memory.input_bytes == 2 * B * T * D
    # The product and its tanh, or the tanh and the result: the former is more.
    assert memory.temporary_bytes == 2 * 2 * B * T * 8 * D
    assert memory.peak_bytes == sum(
        (memory.weight_bytes, memory.input_bytes, memory.temporary_bytes)
    )


def test_a_loop_without_a_length_and_an_unknown_cost_are_reported():
    def model(x):
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: jax.lax.igamma(c, c @ c), x)

    found = report(model, spec(8, 8, dtype=jnp.float32))
    assert not found.exact
    assert found.unknown == ("while",)


def attend(q, k):
    return jax.nn.softmax(q @ k.mT) @ k


_in_vmap = jax.custom_batching.custom_vmap(attend)
_in_vmap.def_vmap(lambda size, batched, q, k: (attend(q, k), True))
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
NESTED = {
    "cond": lambda q, k, c: jax.lax.cond(c, attend, lambda q, k: q, q, k),
    "product": lambda q, k, c: jax.lax.cond(c, lambda q, k: q @ k.mT @ k, lambda q, k: q, q, k),
    "switch": lambda q, k, c: jax.lax.switch(c.astype(int), [attend, lambda q, k: q], q, k),
    "while": lambda q, k, c: jax.lax.while_loop(
        lambda s: s[0].sum() > 9, lambda s: (attend(*s), k), (q, k)
    )[0],
    "scan": lambda q, k, c: jax.lax.scan(lambda x, _: (attend(x, k), None), q, None, length=1)[0],
    "remat": lambda q, k, c: jax.checkpoint(attend)(q, k),
    "custom_vmap": lambda q, k, c: _in_vmap(q, k),
    "shard_map": lambda q, k, c: jax.shard_map(
        attend, mesh=MESH, in_specs=jax.P("i"), out_specs=jax.P("i")
    )(q, k),
}


@pytest.mark.parametrize("outer", ["", "cond", "scan"])
@pytest.mark.parametrize("name", NESTED)
def test_attention_is_counted_inside_anything_that_has_a_body(name, outer):
    """The time of a branch on a GPU was that of its predicate, which has no width."""

    def inner(q, k, c):
        return NESTED[name](q, k, c)

    def function(q, k, c):
        if outer == "cond":
            return jax.lax.cond(c, inner, lambda q, k, c: q, q, k, c)
        if outer == "scan":
            return jax.lax.scan(lambda x, _: (inner(x, k, c), None), q, None, length=1)[0]
        return inner(q, k, c)

    found = report(function, *[spec(2, 256, 64, dtype=jnp.float32)] * 2, spec(dtype=jnp.bool))
    assert found.unknown == ()
    products = 2 * 2 * 2 * 256 * 256 * 64
    assert products <= sum(point.flops for point in found.points) < 1.1 * products
    assert {point.dtype for point in found.points} <= {"", "float32"}
    assert any(point.kind == "attention" and point.tensor_s > 0 for point in found.points)


def test_a_report_prints_as_text():
    found = attended(name="a model", items=B)
    lines = str(found).splitlines()
    assert lines[0] == "a model, forward (batch 2), bfloat16, attention fused"
    assert "predicted for NVIDIA H200: " in lines[1]
    assert any(line.startswith("total: ") for line in lines)
    assert lines[-1].startswith("bound by ")
    assert max(map(len, lines)) <= 100


def test_report_is_json_compatible():
    data = json.loads(json.dumps(attended().to_dict()))
    assert data["total"]["bound"] in ("memory", "compute")
    assert {"weights", "activations", "kv_cache", "total"} == set(data["total"]["bytes"])
    assert data["device"]["ridge_point_flop_per_byte"] == pytest.approx(206, abs=1)


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [
        (DeviceError, lambda: roofline_report(jnp.tanh, spec(2), device="abacus"), "'abacus'"),
        (InputError, lambda: report(jnp.tanh, spec(2), cache=(1,)), "there are 1"),
        (InputError, lambda: report(jnp.add, *[spec(2)] * 2, weights=(1,), cache=(1,)), "once"),
        (InputError, lambda: report(jnp.tanh, spec(2), attention="some"), "'some'"),
        (ModelError, lambda: report(lambda x: x if x.sum() > 0 else -x, spec(2)), "traced"),
        (ModelError, lambda: report(lambda x, y: x @ y, spec(2, 3), spec(4, 5)), "traced"),
        (ModelError, lambda: report(lambda x: x.missing, spec(2, 3)), "no attribute"),
    ],
)
def test_bad_input_is_refused_in_one_line(error, call, words):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.count(";") >= 2
