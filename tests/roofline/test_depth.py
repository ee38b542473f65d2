"""The report of a deep model from two shallow ones: equal to that of the model traced whole."""

import jax
import jax.numpy as jnp
import pytest

from pbjax.errors import InputError
from pbjax.roofline.depth import TRACED_LAYERS, deep_report
from pbjax.roofline.report import roofline_report
from tests.jobs import check_house_form

WEIGHT = jax.ShapeDtypeStruct((64, 64), jnp.float32)
X = jax.ShapeDtypeStruct((8, 64), jnp.float32)


def layers(weights, x):
    for weight in weights:
        x = jax.nn.gelu(x @ weight)
    return x


def report_at(num_layers):
    weights = [WEIGHT] * num_layers
    return roofline_report(layers, weights, X, device="nvidia-h200", weights=(0,), name="layers")


def test_a_deep_function_costs_what_it_does_traced_whole():
    traced = []

    def noted(num_layers):
        traced.append(num_layers)
        return report_at(num_layers)

    drawn, whole = deep_report(noted, 40), report_at(40)
    assert traced == [TRACED_LAYERS - 1, TRACED_LAYERS]
    assert drawn.memory == whole.memory
    assert [point.repeats for point in drawn.points] == [point.repeats for point in whole.points]
    assert drawn.total.seconds == pytest.approx(whole.total.seconds)
    assert drawn.total.flops == pytest.approx(whole.total.flops)


def test_a_shallow_model_is_traced_as_it_is():
    assert deep_report(report_at, 2) == report_at(2)


def test_a_model_without_layers_is_refused():
    with pytest.raises(InputError, match="num_layers=0") as error:
        deep_report(report_at, 0)
    check_house_form(error)
