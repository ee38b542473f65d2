import dataclasses
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.hf_config import ConfigFields
from models.rotary import Rotary, read_rotary, rotary_frequencies, rotary_table

DATA = Path(__file__).parents[1] / "data"
SCALING = {"factor": 8.0, "low": 1.0, "high": 4.0, "original_len": 8192}
PLAIN = Rotary(theta=500000.0)
HUGGING_FACE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OURS = Rotary(theta=500000.0, **SCALING)


def read(**fields):
    reader = ConfigFields(fields)
    rotary = read_rotary(reader)
    reader.warn_unknown()
    return rotary


def refused(**fields):
    with pytest.raises(models.ConfigError) as caught:
        read(**fields)
    return str(caught.value)


# Frequencies and rotation


def scaled_by_cases(frequency, factor, low, high, original_len):
    """The three cases as LLaMA 3.1 states them."""
    wavelength = 2 * math.pi / frequency
    if wavelength < original_len / high:
        return frequency
    if wavelength > original_len / low:
        return frequency / factor
    smooth = (original_len / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def test_plain_frequencies_are_powers_of_theta():
    actual = rotary_frequencies(PLAIN, 128)
    expected = [500000.0 ** (-2 * i / 128) for i in range(64)]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert actual.dtype == np.float32


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaled_frequencies_follow_the_three_cases(factor):
    actual = rotary_frequencies(dataclasses.replace(OURS, factor=factor), 128)
    plain = [500000.0 ** (-2 * i / 128) for i in range(64)]
    expected = [scaled_by_cases(f, **(SCALING | {"factor": factor})) for f in plain]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_frequencies_of_llama_31_are_those_of_transformers_to_the_last_bit():
    expected = np.load(DATA / "llama" / "frequencies.npz")["frequencies"]
    actual = rotary_frequencies(OURS, 128)
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)


def test_bands_of_llama_31():
    ratio = rotary_frequencies(OURS, 128) / rotary_frequencies(PLAIN, 128)
    assert (ratio == 1).sum() == 29
    assert (ratio == 1 / 8).sum() == 29
    assert ((ratio < 1) & (ratio > 1 / 8)).sum() == 6


def test_rotation_turns_the_pairs_half_a_head_apart():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
    frequencies = rotary_frequencies(Rotary(theta=100.0), 8)
    positions = np.array([[0, 4, 9]], np.int32)
    actual = rotary_table(frequencies, 3, positions).rotate(jnp.asarray(x))
    turn = np.exp(1j * positions[0][:, None] * frequencies)[None, :, None]
    expected = (x[..., :4] + 1j * x[..., 4:]) * turn
    np.testing.assert_allclose(
        actual, np.concatenate([expected.real, expected.imag], -1), atol=1e-6
    )


def test_positions_count_from_zero_where_none_are_given():
    frequencies = rotary_frequencies(Rotary(theta=100.0), 8)
    one = rotary_table(frequencies, 5, None)
    two = rotary_table(frequencies, 5, np.arange(5, dtype=np.int32)[None])
    np.testing.assert_array_equal(one.cos, two.cos)
    np.testing.assert_array_equal(one.sin, two.sin)


# Fields of transformers 4 and 5


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}, {}])
def test_plain_rotary_of_version_4(scaling):
    assert read(rope_theta=500000.0, rope_scaling=scaling) == PLAIN


def test_absent_scaling_is_plain():
    assert read(rope_theta=500000) == PLAIN


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_scaling_of_version_4(key):
    scaling = {k: v for k, v in HUGGING_FACE.items() if k != "rope_type"} | {key: "llama3"}
    assert read(rope_theta=500000.0, rope_scaling=scaling) == OURS


def test_both_spellings_of_the_kind_that_agree_are_read():
    scaling = HUGGING_FACE | {"type": "llama3"}
    assert read(rope_theta=500000.0, rope_scaling=scaling) == OURS


def test_both_spellings_of_the_kind_that_differ_are_refused():
    scaling = HUGGING_FACE | {"type": "default"}
    assert "rope_scaling: type is " in refused(rope_theta=500000.0, rope_scaling=scaling)


def test_parameters_of_version_5():
    assert read(rope_parameters=HUGGING_FACE | {"rope_theta": 500000.0}) == OURS
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    assert read(rope_parameters=plain) == PLAIN


def test_both_versions_that_agree_are_read():
    parameters = HUGGING_FACE | {"rope_theta": 500000.0}
    both = {"rope_theta": 500000, "rope_scaling": HUGGING_FACE, "rope_parameters": parameters}
    assert read(**both) == OURS


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ({"rope_theta": 10000.0}, "rope_theta"),
        ({"rope_scaling": HUGGING_FACE | {"factor": 32.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "default"}}, "rope_scaling"),
    ],
)
def test_both_versions_that_differ_are_refused(old, name):
    message = refused(rope_parameters=HUGGING_FACE | {"rope_theta": 500000.0}, **old)
    assert f"{name} is not that of rope_parameters" in message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "rope_theta is missing"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; an object is needed"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: type is 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)
def test_unsupported_rotary_is_refused_by_name(fields, message):
    assert message in refused(**({"rope_theta": 500000.0} if fields else {}) | fields)


def test_unknown_field_inside_gives_a_warning():
    with pytest.warns(models.CheckpointWarning, match="rope_scaling: unknown .* surprise"):
        read(rope_theta=500000.0, rope_scaling={"surprise": 1})
