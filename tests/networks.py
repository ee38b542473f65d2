"""Small networks, written in every way that users write them, for the tests of the engine."""

from collections.abc import Callable
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

D, F, T = 8, 12, 3


@dataclass(frozen=True, kw_only=True)
class Network:
    """A model with what optimize needs to know about it.

    `inputs(batch_size)` makes example inputs; `direct` calls the model as its user would.
    """

    model: object
    direct: Callable
    inputs: Callable
    variables: object = None
    batch_axes: object = 0


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def tokens(batch_size):
    return (normal(7, batch_size, T, D),)


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class NnxLoop(nnx.Module):
    def __init__(self, num_layers, rngs):
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(num_layers)])
        self.head = nnx.Linear(D, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NnxScan(nnx.Module):
    def __init__(self, num_layers, rngs):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs):
            return NnxLayer(rngs)

        self.layers = layers(rngs)
        self.head = nnx.Linear(D, 5, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return self.head(run(x, self.layers))


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(F)(nn.RMSNorm()(x))
        return x + nn.Dense(D)(jnp.tanh(y))


class LinenLoop(nn.Module):
    num_layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.num_layers):
            x = LinenLayer()(x)
        return nn.Dense(5)(x)


class LinenScanLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return LinenLayer()(x), None


class LinenScan(nn.Module):
    num_layers: int

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            LinenScanLayer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )
        x, _ = layers()(x, None)
        return nn.Dense(5)(x)


def nnx_loop(num_layers):
    model = NnxLoop(num_layers, nnx.Rngs(0))
    return Network(model=model, direct=model, inputs=tokens)


def nnx_scan(num_layers):
    model = NnxScan(num_layers, nnx.Rngs(0))
    return Network(model=model, direct=model, inputs=tokens)


def _linen(model):
    variables = model.init(jax.random.key(0), *tokens(2))
    return Network(
        model=model,
        direct=lambda *inputs: model.apply(variables, *inputs),
        inputs=tokens,
        variables=variables,
    )


def linen_loop(num_layers):
    return _linen(LinenLoop(num_layers))


def linen_scan(num_layers):
    return _linen(LinenScan(num_layers))


def function_loop(num_layers):
    """A plain function that closes over its weights and returns every layer's output."""
    up = [normal(10 + i, D, F) * 0.3 for i in range(num_layers)]
    down = [normal(50 + i, F, D) * 0.3 for i in range(num_layers)]

    def model(x):
        first, hidden = x, []
        for a, b in zip(up, down, strict=True):
            x = jnp.tanh(x @ a) @ b + x + 0.1 * first
            hidden.append(x)
        return {"last": x, "hidden": hidden, "mean": x.mean(axis=1)}

    return Network(model=model, direct=model, inputs=tokens)


def function_scan(num_layers):
    """A scan that stacks a result of every layer, with a carry that starts from a literal."""
    up, down = normal(1, num_layers, D, F) * 0.3, normal(2, num_layers, F, D) * 0.3

    def model(x):
        def body(carry, weights):
            y, count = carry
            y = y + jnp.tanh(y @ weights[0]) @ weights[1]
            return (y, count + 1), jnp.max(y, axis=-1)

        (y, count), maxima = jax.lax.scan(body, (x, 0), (up, down))
        return y, jnp.swapaxes(maxima, 0, 1), count

    return Network(model=model, direct=model, inputs=tokens)


def two_axes(num_layers):
    """Two inputs with different batch axes, one shared input, and a batch-second output."""
    weights = [normal(20 + i, D, D) * 0.3 for i in range(num_layers)]

    def model(x, lengths, scale):
        mask = jnp.arange(T)[:, None] < lengths[0][None, :]
        for w in weights:
            x = jnp.where(mask[:, :, None], jnp.sin(x @ w) * scale + x, x)
        return x, lengths

    def inputs(batch_size):
        lengths = (jnp.arange(batch_size) % T + 1)[None, :]
        return normal(3, T, batch_size, D), lengths, jnp.float32(0.7)

    return Network(model=model, direct=model, inputs=inputs, batch_axes=(1, 1, None))


def no_repetition(num_layers):
    w, v = normal(4, D, F), normal(5, F, 2)

    def model(x):
        return jnp.exp(-jnp.square(x @ w)) @ v

    return Network(model=model, direct=model, inputs=tokens)


NETWORKS = {
    build.__name__: build
    for build in (
        nnx_loop,
        nnx_scan,
        linen_loop,
        linen_scan,
        function_loop,
        function_scan,
        two_axes,
        no_repetition,
    )
}
