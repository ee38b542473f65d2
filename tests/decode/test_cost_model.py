"""Predicted seconds of a step's operations: at sizes that were never traced, alone and together."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from pallas_kernels.corun import costs, pairs
from pallas_kernels.corun.shapes import DECODE_LAYERS
from pbjax.decode.cost_model import Costs, predicted_s, rates_of
from pbjax.decode.interleave import Launch, Piece, Role, interleave
from pbjax.device import find_device
from pbjax.graph.trace import trace
from tests.cases import long_but
from tests.kernel_decoder import H200, LAYERS, decode_step, inputs

DEVICE = find_device("NVIDIA H200")
RATES = rates_of(DEVICE)
PEAK = DEVICE.memory_bytes_per_s


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


@functools.cache
def graph(size):
    with use_abstract_mesh(H200):
        return trace(lambda p, *i: decode_step(*i), (), *inputs(size))


def product(m, k, n, gated=False):
    given = {"x": shape(m, k), "w": shape(k, n), "activation": None}
    given |= {"w_gate": shape(k, n)} if gated else {"residual": None, "bias": None}
    return pairs.Call(name="gated_gemm" if gated else "gemm", arguments=given)


def attention(layer, size):
    cache = shape(size, layer.num_keys, layer.num_kv_heads, layer.head_dim)
    given = {"q": shape(size, 1, layer.num_heads, layer.head_dim), "k": cache, "v": cache}
    return pairs.Call(name="decode_attention", arguments=given | {"page_table": None})


@pytest.mark.parametrize("size", long_but([7, 2, 11]))
def test_items_of_a_size_are_those_of_the_function_traced_at_it(size):
    # From sizes 16 and 3 to any other, also outside of them.
    found = Costs((graph(16), graph(3)), (16, 3), RATES).items(size)
    traced = Costs((graph(size), graph(16)), (size, 16), RATES).items(size)
    for got, want in zip(found, traced, strict=True):
        assert (got.role, got.parts, got.num_bytes) == (want.role, want.parts, want.num_bytes)
        assert got.seconds == pytest.approx(want.seconds)
        assert got.paired_s == want.paired_s
    assert sum(item.role == Role.MEMORY for item in found) == LAYERS


# Microseconds of a layer as two half layers, by device time: docs/design/corun.md.
@pytest.mark.parametrize(
    ("layer", "measured_us"), list(zip(DECODE_LAYERS, (916, 758, 780, 794), strict=True))
)
def test_a_layer_of_launches_is_predicted_within_a_tenth(layer, measured_us):
    half = layer.batch_size // 2
    memory = costs.alone_s(attention(layer, half), PEAK)
    calls = [product(half, k, n, name == "up") for name, (k, n) in layer.products.items()]
    compute_kernels = [costs.paired_s(call) for call in calls]
    moved = costs.num_bytes(attention(layer, half))
    together = sum(
        costs.together_s(
            compute,
            memory * compute / sum(compute_kernels),
            costs.num_bytes(call) + moved * compute / sum(compute_kernels),
            PEAK,
        )
        for call, compute in zip(calls, compute_kernels, strict=True)
    )
    assert 2 * together == pytest.approx(1e-6 * measured_us, rel=0.1)


def test_a_product_alone_takes_what_the_table_of_its_tiles_says():
    # Measured: 1,200 us.
    assert costs.alone_s(product(4_096, 4_096, 14_336, gated=True), PEAK) == pytest.approx(
        1_200e-6, rel=0.05
    )


# Of out and down of LLaMA3-8B, microseconds of cuBLASLt: docs/design/kernels.md.
@pytest.mark.parametrize(
    ("rows", "k", "measured_us"),
    [
        *((64, 4_096, 11.2), (128, 4_096, 13.7), (256, 4_096, 15.8)),
        *((64, 14_336, 30.7), (128, 14_336, 35.2), (256, 14_336, 48.6)),
    ],
)
def test_a_product_of_few_tiles_takes_what_the_library_does(rows, k, measured_us):
    found = costs.alone_s(product(rows, k, 4_096), PEAK)
    assert found == pytest.approx(1e-6 * measured_us, rel=0.12)


def test_bytes_of_a_paged_cache_are_those_of_its_table():
    layer = dataclasses.replace(DECODE_LAYERS[0], num_keys=64)
    paged = attention(layer, 8).arguments | {"page_table": shape(8, 4)}
    whole = attention(dataclasses.replace(layer, num_keys=256), 8)
    call = pairs.Call(name="decode_attention", arguments=paged)
    assert costs.num_bytes(call) == costs.num_bytes(whole)


def test_only_hosts_and_guests_have_costs():
    other = pairs.Call(name="rms_norm", arguments={})
    with pytest.raises(ValueError, match="predict other operations by their bytes"):
        costs.alone_s(other, PEAK)


def test_what_rides_is_predicted_to_cost_less_than_what_runs_alone():
    found = Costs((graph(16), graph(2)), (16, 2), RATES).items(8)
    sub_batches = found, found
    apart, together = (interleave(*sub_batches, capacity) for capacity in (0.0, 1e6))
    alone = sum(item.seconds for sub_batch in sub_batches for item in sub_batch)
    assert predicted_s(apart, sub_batches, RATES) == pytest.approx(alone)
    assert predicted_s(together, sub_batches, RATES) < alone


def test_a_guest_in_pieces_costs_that_they_are_joined():
    found = Costs((graph(16), graph(2)), (16, 2), RATES).items(16)
    place = next(i for i, item in enumerate(found) if item.role == Role.MEMORY)
    parts, sub_batches = found[place].parts, (found, found)

    def seconds(*counts):
        first, launches = 0, []
        for count in counts:
            launches.append(Launch(main=Piece(sub_batch=0, item=place, first=first, count=count)))
            first += count
        return predicted_s(launches, sub_batches, RATES)

    extra = seconds(1, parts - 1) - seconds(parts)
    assert extra == pytest.approx(found[place].join_s)


def test_devices_that_nobody_measured_are_taken_to_reach_a_share_of_their_bandwidth():
    unknown = dataclasses.replace(DEVICE, slug="nobody_measured_this")
    rates = rates_of(unknown)
    assert rates.reached.memory_bytes_per_s == pytest.approx(0.9 * PEAK)
    assert rates.peak_bytes_per_s == PEAK
