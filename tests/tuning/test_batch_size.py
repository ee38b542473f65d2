"""The choice of a batch: predicted and measured, within a limit of latency, with its reasons."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pbjax.cli.batch_options import read_batch
from pbjax.device import find_device
from pbjax.errors import InputError, InputTypeError, MemoryBudgetError
from pbjax.planning.profiling import Timing
from pbjax.roofline.batch_study import SizePoint, choose_point
from pbjax.tuning import batch_size as batch_choice
from pbjax.tuning.batch_size import MEASURED_AT_MOST, candidates, choose_batch, measured_points
from tests.jobs import check_house_form

H200, CPU = find_device("NVIDIA H200"), find_device("cpu", num_cores=2)
WEIGHTS = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
ROW = jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16)


def layers(x, w):
    for _ in range(8):
        x = jax.nn.relu(x @ w)
    return x


def choose(**options):
    return choose_batch(layers, ROW, WEIGHTS, device=H200, batch_axes=(0, None), **options)


def test_the_smallest_batch_near_the_best_throughput_is_chosen():
    found = choose(max_batch=4096)
    by_batch = {p.batch_size: p.tokens_per_s for p in found.predicted}
    best = max(by_batch.values())
    assert by_batch[found.batch_size] >= 0.98 * best
    assert all(rate < 0.98 * best for rows, rate in by_batch.items() if rows < found.batch_size)
    assert str(found.batch_size) in str(found)
    assert found.kv_bytes_per_row == 0


def test_a_limit_makes_the_batch_smaller_and_says_so():
    free = choose(max_batch=4096)
    limit = (free.choice.chosen.seconds + free.predicted[0].seconds) / 2
    found = choose(max_batch=4096, latency_s=limit)
    assert found.batch_size < free.batch_size
    assert found.choice.chosen.seconds <= limit
    assert "latency" in found.choice.reason


def test_no_batch_within_the_limit_is_an_error_with_the_figures():
    with pytest.raises(InputError, match=r"latency 1e-06 ms.*GB"):
        choose(latency_s=1e-9)


@pytest.mark.parametrize("latency_s", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_no_time_is_refused(latency_s):
    with pytest.raises(InputError, match="not a time"):
        choose(latency_s=latency_s)


def test_a_model_that_does_not_fit_at_all_is_an_error_with_the_figures():
    small = dataclasses.replace(H200, memory_bytes=10_000_000)
    with pytest.raises(MemoryBudgetError, match="GB whatever the batch"):
        choose_batch(layers, ROW, WEIGHTS, device=small, batch_axes=(0, None))


def test_a_cache_is_told_apart():
    cache = jax.ShapeDtypeStruct((1, 1024, 128), jnp.bfloat16)
    found = choose_batch(
        lambda x, c: jnp.einsum("bd,bsd->bs", x, c),
        jax.ShapeDtypeStruct((1, 128), jnp.bfloat16),
        cache,
        device=H200,
        cache=(1,),
    )
    assert found.kv_bytes_per_row == 1024 * 128 * 2
    assert "of KV cache a row" in str(found)


def test_inputs_without_a_batch_are_refused():
    with pytest.raises((InputError, InputTypeError)):
        choose_batch(layers, ROW, WEIGHTS, device=H200, batch_axes=None)


def test_candidates_are_powers_of_two_and_halves_between():
    assert candidates(13) == (1, 2, 3, 4, 6, 8, 12, 13)
    assert candidates(1) == (1,)


def points(sizes, seconds):
    return [
        SizePoint(
            phase="forward",
            batch_size=rows,
            seq_len=0,
            seconds=seconds(rows),
            tokens_per_s=rows / seconds(rows),
            dense_intensity=0.0,
            dense_flops_per_s=0.0,
            attention_intensity=0.0,
            attention_flops_per_s=0.0,
            peak_bytes=1,
            fits=True,
        )
        for rows in sizes
    ]


PREDICTED = points((1, 2, 4, 8, 16, 32, 64), lambda rows: 1e-3 + 1e-4 * rows)


def test_measuring_goes_on_to_larger_batches_while_they_gain():
    found = measured_points(PREDICTED[:3], lambda rows: 1e-3, None)
    assert [p.batch_size for p in found] == [2, 4]
    start = points((1, 2, 4, 8, 16, 32, 64), lambda rows: 1e-3 * max(1, rows / 4))
    found = measured_points(start, lambda rows: 1e-3 * max(1.0, rows / 16), None)
    assert [p.batch_size for p in found] == [4, 8, 16, 32, 64]


def test_measuring_goes_down_until_the_limit_is_kept():
    found = measured_points(PREDICTED, lambda rows: 5e-3 + 1e-2 * rows, 0.046)
    assert choose_point(found, 0.046).chosen.batch_size == 4
    assert len(found) <= MEASURED_AT_MOST


def test_measuring_stops_after_a_few_when_nothing_keeps_the_limit():
    asked = []
    found = measured_points(PREDICTED, lambda rows: asked.append(rows) or 1.0, 0.003)
    assert len(asked) == len(found) <= MEASURED_AT_MOST


def test_one_slow_sample_does_not_end_the_measuring():
    start = points((1, 2, 4, 8, 16), lambda rows: 1e-3 * rows)
    found = measured_points(start, lambda rows: 1e-2 if rows == 2 else 1e-3, None)
    assert [p.batch_size for p in found] == [1, 2, 4, 8, 16]


def test_a_device_is_measured(monkeypatch):
    seconds = {}

    def timed(function, params, *inputs, samples):
        rows = inputs[0].shape[0]
        assert function(params, *inputs).shape == (rows, 8)
        seconds[rows] = 1e-3 * rows**0.5
        return Timing(median_s=seconds[rows], spread_s=0.0, samples=samples)

    monkeypatch.setattr(batch_choice, "time_function", timed)
    inputs = jnp.ones((3, 8)), jnp.ones((8, 8))
    options = {"batch_axes": (0, None), "max_batch": 8, "measure": True}
    found = choose_batch(layers, *inputs, device=CPU, **options)
    assert {p.batch_size for p in found.measured} == set(seconds)
    assert found.choice.chosen in found.measured
    assert found.batch_size == 8


def test_shapes_cannot_be_measured():
    with pytest.raises(InputError, match="arrays are needed"):
        choose(measure=True)


def test_the_option_is_a_number_or_auto():
    assert read_batch("96", None) == 96
    assert read_batch("auto", 50.0) is None


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5", "²"])
def test_an_option_that_is_no_batch_is_refused(text):
    with pytest.raises(InputError, match="not a number of rows"):
        read_batch(text, None)


def test_a_limit_for_a_given_batch_is_refused():
    with pytest.raises(InputError, match="the batch is given already"):
        read_batch("96", 50.0)


@pytest.mark.parametrize("limit", [0.0, -5.0, float("nan")])
def test_a_limit_that_is_no_time_is_refused_before_the_model_is_loaded(limit):
    with pytest.raises(InputError, match="not a time") as error:
        read_batch("auto", limit)
    check_house_form(error)
