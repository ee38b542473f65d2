"""What fewer bits, more devices and a draft model would change, against figures by hand."""

import math
import random
from dataclasses import replace
from functools import cache

import pytest

from pbjax.device import find_device
from pbjax.errors import InputError
from pbjax.roofline.points import Traffic
from pbjax.roofline.report import roofline_report
from pbjax.roofline.tables import speculation_text
from pbjax.roofline.what_if import (
    Speculation,
    break_even_batch,
    expected_tokens,
    speculate,
    speculative_speedup,
    with_fp8,
    with_kv_bits,
    with_tensor_parallel,
    with_weight_bits,
)
from tests.shapes import few_layers

H200, A100 = find_device("NVIDIA H200"), find_device("NVIDIA A100-SXM4-80GB")
LAYERS = 3
MODEL = few_layers("gpt2-medium", LAYERS)
LAYER_BYTES = 2 * LAYERS * 12 * 1024**2


@cache
def report(phase="decode", batch=4, seq=512, device=H200):
    call = MODEL.call(phase, batch, seq)
    return roofline_report(
        call.function, *call.inputs, device=device, cache=call.cache, tokens=call.tokens
    )


@pytest.mark.parametrize(("bits", "group", "factor"), [(8, None, 0.5), (4, 128, 4.125 / 16)])
def test_weights_of_the_blocks_shrink_and_nothing_else(bits, group, factor):
    plain, found = report(), with_weight_bits(report(), bits, group=group).report
    saved = (1 - factor) * LAYER_BYTES
    assert plain.total.traffic.weights - found.total.traffic.weights == pytest.approx(saved)
    assert plain.memory.weight_bytes - found.memory.weight_bytes == pytest.approx(saved)
    assert found.total.flops == plain.total.flops
    assert found.total.traffic.kv_cache == plain.total.traffic.kv_cache
    seconds = plain.total.seconds - found.total.seconds
    assert seconds == pytest.approx(saved / H200.memory_bytes_per_s, rel=1e-6)


def test_lighter_weights_do_not_help_a_prompt_that_arithmetic_bounds():
    plain = report("prefill", 16, 512)
    found = with_weight_bits(plain, 4, group=128).report
    assert found.total.seconds == pytest.approx(plain.total.seconds, rel=1e-3)
    assert with_fp8(plain).report.total.seconds < 0.85 * plain.total.seconds


def test_fp8_halves_what_the_layers_compute():
    plain, found = report("prefill", 16, 512), with_fp8(report("prefill", 16, 512)).report
    ratio = H200.tensor_flops_per_s["bfloat16"] / H200.tensor_flops_per_s["float8_e4m3fn"]
    pairs = zip(plain.points, found.points, strict=True)
    layers = [(a, b) for a, b in pairs if a.kind == "dense" and a.repeats > 1]
    assert len(layers) == 4
    for a, b in layers:
        assert b.tensor_s == pytest.approx(ratio * a.tensor_s)
        assert b.traffic.weights == a.traffic.weights / 2


def test_fp8_needs_tensor_cores_that_take_it():
    with pytest.raises(InputError, match=r"A100.*FP8"):
        with_fp8(report(device=A100))


def test_every_group_keeps_its_bandwidth():
    """Products of few rows read weights faster than a copy moves bytes: ceilings know both."""
    fast = replace(H200, memory_bytes_per_s=4e12, weight_bytes_per_s=4.4e12)
    plain = report("decode", device=fast)
    heads = MODEL.config.embed_dim // MODEL.config.num_heads
    for variant in (with_kv_bits(plain, 16, 10**9), with_weight_bits(plain, 16)):
        assert variant.report.total.seconds == pytest.approx(plain.total.seconds, rel=1e-6)
    assert with_kv_bits(plain, 8, heads).report.total.seconds < plain.total.seconds
    half = with_weight_bits(plain, 8).report
    dense = [[p for p in r.points if p.kind == "dense" and p.repeats > 1] for r in (half, plain)]
    for less, whole in zip(*dense, strict=True):
        assert less.memory_s / less.traffic.total == pytest.approx(
            whole.memory_s / whole.traffic.total
        )


def test_cache_shrinks_in_traffic_and_memory():
    plain, found = report(), with_kv_bits(report(), 8, 64).report
    factor = (8 + 16 / 64) / 16
    assert found.total.traffic.kv_cache == pytest.approx(factor * plain.total.traffic.kv_cache)
    assert found.memory.kv_cache_bytes == round(factor * plain.memory.kv_cache_bytes)
    assert found.total.traffic.weights == plain.total.traffic.weights


def test_a_call_without_a_cache_has_no_bits_to_save():
    with pytest.raises(InputError, match="no KV cache"):
        with_kv_bits(report("forward"), 8, 64)


@pytest.mark.parametrize("degree", [2, 8])
def test_devices_share_layers_and_pay_for_sums(degree):
    plain, found = report(), with_tensor_parallel(report(), degree, 1024, LAYERS).report
    assert found.total.flops == pytest.approx(plain.total.flops / degree)
    assert found.memory.weight_bytes == math.ceil(plain.memory.weight_bytes / degree)
    sums = found.points[-1]
    sent = 2 * (degree - 1) / degree * 4 * 1024 * 2
    assert sums.seconds == pytest.approx(2 * LAYERS * sent / 450e9)
    assert sums.traffic == Traffic()
    assert plain.total.seconds / degree < found.total.seconds < plain.total.seconds


def test_a_device_without_a_link_or_another_has_no_parallel():
    alone = replace(report(), device=replace(H200, link_bytes_per_s=None))
    for call in (
        lambda: with_tensor_parallel(alone, 2, 1, 1),
        lambda: with_tensor_parallel(report(), 1, 1, 1),
    ):
        with pytest.raises(InputError, match="link"):
            call()


@pytest.mark.parametrize(("acceptance", "drafted"), [(0.6, 4), (0.8, 5), (0.95, 2)])
def test_expected_tokens_are_those_of_a_simulation(acceptance, drafted):
    generator = random.Random(1)

    def round_():
        kept = 0
        while kept < drafted and generator.random() < acceptance:
            kept += 1
        return kept + 1

    mean = sum(round_() for _ in range(40_000)) / 40_000
    assert expected_tokens(acceptance, drafted) == pytest.approx(mean, rel=0.01)


def test_expected_tokens_at_the_ends():
    assert expected_tokens(0, 5) == 1
    assert expected_tokens(1, 5) == 6
    for bad in ((-0.1, 3), (1.1, 3), (0.5, 0)):
        with pytest.raises(InputError):
            expected_tokens(*bad)


def test_speedup_is_that_of_the_paper():
    """Table 1 of Leviathan et al.: a = 0.8, g = 5, a free draft, gives 3.69 times."""
    assert speculative_speedup(0.8, 5, 0) == pytest.approx(3.69, abs=0.005)
    assert speculative_speedup(0.9, 10, 0) == pytest.approx(6.86, abs=0.005)
    assert speculative_speedup(0.8, 5, 0.05) == pytest.approx(3.689 / 1.25, abs=0.005)


def test_checking_that_costs_as_much_as_it_makes_gains_nothing():
    assert speculative_speedup(1, 4, 0, verify_cost=5) == 1
    assert speculative_speedup(0.8, 4, 0.1, verify_cost=5) < 1


def test_speedup_falls_with_the_batch_and_breaks_even():
    def plain(rows):
        return max(1.0, rows / 100)

    def verify(rows):
        return max(1.0, 5 * rows / 100)

    def draft(rows):
        return 0.1 * plain(rows)

    options = {"acceptance": 0.8, "num_drafted": 4}

    def speedup(rows):
        return speculate(plain, verify, draft, batches=(rows,), **options)[0].speedup

    found = speculate(plain, verify, draft, batches=(1, 20, 50, 100), **options)
    assert [s.speedup for s in found] == sorted((s.speedup for s in found), reverse=True)
    # 3.36 tokens for 0.4 + rows / 20 steps.
    assert break_even_batch(speedup, 1000) == math.floor((expected_tokens(0.8, 4) - 0.4) * 20)
    assert break_even_batch(speedup, 40) is None
    assert break_even_batch(lambda rows: 0.9, 40) == 0


@pytest.mark.parametrize(
    ("even", "words"), [(None, "every batch up to 8"), (5, "up to batch 5"), (0, "at no batch")]
)
def test_the_break_even_is_said_in_words(even, words):
    found = [Speculation(batch_size=8, draft_cost=0.2, verify_cost=1.0, speedup=1.5)]
    assert words in speculation_text(found, even, drafted=4, acceptance=0.8).splitlines()[-1]
