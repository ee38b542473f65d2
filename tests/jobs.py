"""Jobs of `optimize` on small networks, and what every one of them is checked for."""

import re

import jax
import jax.numpy as jnp

from pallas_kernels.testing import assert_close
from pbjax.pipeline import optimize

from .networks import NETWORKS

HOUSE_FORM = re.compile(r"[^;]+: [^;]+;[^;]+;[^;]+")


def run(network, batch_size, **options):
    return optimize(
        network.model,
        *network.inputs(batch_size),
        variables=network.variables,
        batch_axes=network.batch_axes,
        **options,
    )


def check_house_form(error):
    message = str(error.value)
    assert "\n" not in message
    assert message.count(";") >= 2
    assert HOUSE_FORM.match(message)


def small():
    return NETWORKS["no_repetition"](1)


def scan(num_layers):
    return NETWORKS["function_scan"](num_layers)


def check_outputs(fast, network, batch_size):
    inputs = network.inputs(batch_size)
    found, expected = fast(*inputs), network.direct(*inputs)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.asarray(b).dtype
        assert_close(a, b, reduction=12, roundings=20)
