"""The tiny decoders of tests/data: loading, calling, tracing and changing them."""

import dataclasses
import importlib
import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.extend
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

import models
from models.numeric import errors_against, read_reference
from models.parameters import Parameter, fill, parameters_of

DATA = Path(__file__).parent / "data"
DECODERS = ("bloom", "gpt2", "llama")
POINTS = ("hidden_embedding", "hidden_block_0", "last_hidden_state", "logits")


def family(name):
    return importlib.import_module(models.FAMILIES[name]).FAMILY


@cache
def load(name, dtype=None):
    return models.load(DATA / name, dtype)


@cache
def reference(name):
    return read_reference(DATA / name / "reference.npz")


def errors(name, model=None, probe=None):
    """Errors over std of a model, the fixture's own by default, against the stored values."""
    model = load(name) if model is None else model
    kind = dataclasses.replace(family(name), probe=probe) if probe else family(name)
    return errors_against(kind, model.config, model, reference(name))


def changed(name, config=None, **new):
    """The fixture's model with another configuration or some parameters as f(parameter)."""
    model = load(name)
    values = [
        Parameter(path=p.path, value=new[p.path](p.value)) if p.path in new else p
        for p in parameters_of(model)
    ]
    return fill(family(name), config or model.config, "float32", values)


def inputs(name, batch_size=2, length=12):
    """Random tokens, every other row with padding on its left; positions where they are taken."""
    generator = np.random.default_rng(batch_size)
    mask = np.ones((batch_size, length), np.int32)
    mask[1::2, : length // 2] = 0
    given = {
        "input_ids": generator.integers(1, 97, (batch_size, length)).astype(np.int32),
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(1) - 1, 0).astype(np.int32),
    }
    return {n: value for n, value in given.items() if n in reference(name).inputs}


def call(model, **arguments):
    """The model's output by the jitted function, which compiles once for all tests of a shape."""
    graphdef, state = nnx.split(model)
    return _call(graphdef, state, arguments)


# Compiling takes most of the time of these tests, and running next to none.
@partial(
    jax.jit,
    static_argnums=0,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
def _call(graphdef, state, arguments):
    return nnx.merge(graphdef, state)(**arguments)


def trace(model, **arguments):
    graphdef, state = nnx.split(model)
    return jax.make_jaxpr(lambda state, given: nnx.merge(graphdef, state)(**given))(
        state, arguments
    )


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def operations(model, **arguments):
    """The names of all primitives of a call, in order."""
    return [e.primitive.name for e in equations(trace(model, **arguments).jaxpr)]


def names(name):
    return json.loads((DATA / name / "names.json").read_text())


def tensors_of(name):
    return load_file(DATA / name / "model.safetensors")


def fields_of(name, **change):
    """The fields of a fixture's config.json with some changed, or removed by ... ."""
    fields = json.loads((DATA / name / "config.json").read_text()) | change
    return {field: value for field, value in fields.items() if value is not ...}


def make(folder, name, tensors=None, **change):
    """A folder with a fixture's tensors and configuration, or changed ones."""
    folder.mkdir(exist_ok=True)
    save_file(tensors_of(name) if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields_of(name, **change)))
    return folder


def make_sharded(folder, name):
    """A fixture in the files that transformers would write."""
    folder.mkdir()
    index = names(name)["index"]
    for file in set(index["weight_map"].values()):
        part = {k: v for k, v in tensors_of(name).items() if index["weight_map"][k] == file}
        save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(fields_of(name)))
    return folder
