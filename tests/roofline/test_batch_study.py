"""Curves over batch and length: exact between traced sizes, and what is read off them."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest

from pbjax.device import find_device
from pbjax.errors import InputError, MemoryBudgetError
from pbjax.roofline.batch_study import (
    SizePoint,
    choose_point,
    interpolated,
    size_point,
    study_phase,
)
from pbjax.roofline.points import Total
from pbjax.roofline.report import roofline_report
from pbjax.roofline.tables import turn_text
from tests.shapes import few_layers

H200 = find_device("NVIDIA H200")
MODEL = few_layers("gpt2")
SMALL = replace(H200, kind="small", memory_bytes=2_000_000_000)


@cache
def report_at(phase, batch, seq, device=H200):
    call = MODEL.call(phase, batch, seq)
    return roofline_report(
        call.function,
        *call.inputs,
        device=device,
        cache=call.cache,
        phase=phase,
        items=batch,
        tokens=call.tokens,
    )


def on_small(phase, batch, seq):
    return report_at(phase, batch, seq, SMALL)


@cache
def study(phase):
    return study_phase(
        on_small, phase, batch_size=4, seq_len=256, lengths=(64, 128, 256, 512), max_seq_len=1024
    )


def same(a, b):
    assert a.total.flops == pytest.approx(b.total.flops, rel=1e-9)
    for part in ("weights", "activations", "kv_cache"):
        parts = [getattr(r.total.traffic, part) for r in (a, b)]
        assert parts[0] == pytest.approx(parts[1], rel=1e-9)
    assert a.total.seconds == pytest.approx(b.total.seconds, rel=1e-9)
    assert (a.items, a.tokens) == (b.items, b.tokens)
    assert a.memory == b.memory


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_figures_are_straight_lines_in_the_batch(phase):
    known = {rows: report_at(phase, rows, 256) for rows in (2, 64)}
    same(interpolated(known, 24), report_at(phase, 24, 256))


@pytest.mark.parametrize(("phase", "nodes"), [("prefill", (64, 256, 1024)), ("decode", (64, 1024))])
def test_figures_are_parabolas_in_the_length_and_lines_in_that_of_the_cache(phase, nodes):
    known = {length: report_at(phase, 4, length) for length in nodes}
    same(interpolated(known, 640), report_at(phase, 4, 640))


def test_curves_reach_from_one_row_to_what_fits():
    found = study("decode")
    sizes = [p.batch_size for p in found.by_batch]
    assert sizes[:3] == [1, 2, 4]
    assert sizes[-1] == found.largest_batch
    assert all(p.fits for p in found.by_batch)
    assert [p.seq_len for p in found.by_seq] == [64, 128, 256, 512]
    throughput = [p.tokens_per_s for p in found.by_batch]
    assert throughput == sorted(throughput)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_more_row_than_the_largest_batch_does_not_fit(phase):
    largest = study(phase).largest_batch
    assert on_small(phase, largest, 256).fits
    assert not on_small(phase, largest + 1, 256).fits


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_dense_layers_meet_the_ridge_at_the_critical_batch(phase):
    known = {rows: report_at(phase, rows, 256) for rows in (2, 64)}
    critical = study(phase).critical_batch
    below, above = (
        Total(
            name="", points=tuple(p for p in interpolated(known, b).points if p.kind == "dense")
        ).intensity
        for b in (math.floor(critical), math.ceil(critical))
    )
    assert below <= H200.ridge_point("bfloat16") <= above


def test_decode_needs_as_many_rows_as_prefill_needs_tokens():
    layers = [study(phase).layers["mlp/up"] for phase in ("prefill", "decode")]
    assert layers[1] == pytest.approx(256 * layers[0], rel=1e-6)


def test_attention_gains_nothing_from_the_batch():
    points = study("decode").by_batch
    first, last = points[1], points[-1]
    assert last.attention_intensity == pytest.approx(first.attention_intensity, rel=0.01)
    assert last.dense_intensity > 10 * first.dense_intensity


def test_cache_bytes_are_those_of_a_row():
    config, lengths = MODEL.config, 4
    expected = 2 * 2 * config.num_layers * config.embed_dim * 256 + lengths
    assert study("decode").kv_bytes_per_row == expected


def test_a_model_that_does_not_fit_is_refused_with_its_figures():
    tiny = replace(H200, kind="tiny", memory_bytes=100_000_000)

    def on_tiny(phase, batch, seq):
        return report_at(phase, batch, seq, tiny)

    with pytest.raises(MemoryBudgetError, match=r"0\.1 of weights.*tiny has 0\.1 GB"):
        study_phase(on_tiny, "decode", batch_size=1, seq_len=256)


def test_too_few_lengths_are_refused():
    needed = r"1 of the lengths .* 3 lengths of 64 tokens or more are needed"
    with pytest.raises(InputError, match=needed):
        study_phase(
            on_small,
            "prefill",
            batch_size=1,
            seq_len=256,
            lengths=(64, 2048, 4096),
            max_seq_len=1024,
        )


def test_study_is_json_compatible():
    data = json.loads(json.dumps(study("decode").to_dict(), allow_nan=False))
    assert data["largest_batch"] == study("decode").largest_batch


def point(batch, seconds, tokens_per_s, fits=True):
    return SizePoint(
        phase="decode",
        batch_size=batch,
        seq_len=1,
        seconds=seconds,
        tokens_per_s=tokens_per_s,
        dense_intensity=1.0,
        dense_flops_per_s=1.0,
        attention_intensity=1.0,
        attention_flops_per_s=1.0,
        peak_bytes=1,
        fits=fits,
    )


CURVE = (
    point(1, 0.010, 100.0),
    point(8, 0.011, 700.0),
    point(64, 0.020, 3200.0),
    point(256, 0.060, 4250.0),
    point(512, 0.119, 4300.0),
    point(1024, 0.260, 3900.0),
    point(2048, 0.400, 5000.0, fits=False),
)


def test_the_smallest_batch_on_the_plateau_is_chosen():
    found = choose_point(CURVE)
    assert found.chosen.batch_size == 256
    assert found.runner_up.batch_size == 512
    assert "within 2%" in found.reason


def test_a_latency_limit_decides_and_says_so():
    found = choose_point(CURVE, latency_s=0.05)
    assert found.chosen.batch_size == 64
    assert found.reason == "latency: batch 256 would take 60 ms"


def test_a_larger_batch_that_gives_less_is_named_whatever_the_limit():
    slower = (*CURVE[:3], point(96, 0.040, 2400.0), point(128, 0.060, 2100.0))
    for latency_s in (None, 0.05):
        found = choose_point(slower, latency_s=latency_s)
        assert found.chosen.batch_size == 64
        assert found.reason == "throughput: batch 96 would take 40 ms, and give no more"


def test_the_largest_batch_looked_at_is_called_that():
    assert choose_point(CURVE[:3]).reason == (
        "throughput: it is the best of the 3 looked at, and the largest"
    )


def test_memory_decides_where_throughput_still_rises():
    found = choose_point((*CURVE[:3], CURVE[-1]))
    assert found.chosen.batch_size == 64
    assert "memory" in found.reason


def test_front_has_no_batch_that_another_beats():
    assert [p.batch_size for p in choose_point(CURVE).front] == [1, 8, 64, 256, 512]


@pytest.mark.parametrize("points", [CURVE, CURVE[-1:]])
def test_a_limit_that_no_batch_keeps_is_refused(points):
    with pytest.raises(InputError, match="GB"):
        choose_point(points, latency_s=0.001)


def test_a_point_shows_what_its_report_says():
    report = report_at("decode", 64, 256)
    found = size_point(report, 64, 256)
    assert found.tokens_per_s == 64 / report.total.seconds
    assert found.peak_bytes == report.memory.peak_bytes


def test_a_study_says_where_the_plateau_begins_and_where_throughput_falls():
    found = turn_text(CURVE[:-1], "batch_size", "rows")
    assert found == "is within 2% of its best from 256 rows, and falls again from 1,024"
    assert turn_text(CURVE[:3], "batch_size", "rows").endswith("does not fall again")


def test_a_traced_study_asks_for_a_report_at_every_size():
    asked = []

    def noted(phase, rows, seq_len):
        asked.append((rows, seq_len))
        return on_small(phase, rows, seq_len)

    options = {"batch_size": 4, "seq_len": 256, "batches": (1, 4), "lengths": (64, 128, 256)}
    found = study_phase(noted, "decode", **options, curves="traced")
    assert {(1, 256), (4, 256), (4, 128)} <= set(asked)
    assert found.by_batch[1].seconds == pytest.approx(on_small("decode", 4, 256).total.seconds)
