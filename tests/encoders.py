"""The tiny image and audio models of tests/data: loading, calling, tracing and changing them."""

import importlib
import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.extend
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import models
from models.numeric import errors_against, read_reference
from models.parameters import Parameter, fill, parameters_of

DATA = Path(__file__).parent / "data"
FAMILIES = {
    "ViTModel": "vit",
    "Wav2Vec2ConformerModel": "wav2vec2-conformer",
    "ParakeetModel": "parakeet_ctc",
    "LasrModel": "lasr_ctc",
}


def family(model):
    return importlib.import_module(models.FAMILIES[FAMILIES[type(model).__name__]]).FAMILY


@cache
def load(name, dtype=None):
    return models.load(DATA / name, dtype)


@cache
def reference(name):
    return read_reference(DATA / name / "reference.npz")


@cache
def errors_of(name):
    return errors(load(name), name)


def errors(model, name):
    """Errors over std of a model against the stored values of a fixture."""
    return errors_against(family(model), model.config, model, reference(name))


def changed(model, config=None, **new):
    """The model with a changed configuration or some variables replaced by f(variable)."""
    values = [
        Parameter(path=p.path, value=new[p.path](p.value)) if p.path in new else p
        for p in parameters_of(model)
    ]
    return fill(family(model), config or model.config, "float32", values)


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
    return jax.make_jaxpr(lambda s, given: nnx.merge(graphdef, s)(**given))(state, arguments)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def operations(model, **arguments):
    """The names of all primitives of a call, in order."""
    return [e.primitive.name for e in equations(trace(model, **arguments).jaxpr)]


def scopes(model, **arguments):
    """The first scope of every operation of a call."""
    found = trace(model, **arguments).jaxpr.eqns
    return {str(e.source_info.name_stack).split("/")[0] for e in found}


def tensors_of(name):
    return load_file(DATA / name / "model.safetensors")


def fields_of(name, **change):
    """The fields of a fixture's config.json with some changed, or removed by ... ."""
    fields = json.loads((DATA / name / "config.json").read_text()) | change
    return {field: value for field, value in fields.items() if value is not ...}


def make(folder, name, tensors=None, **change):
    """A folder with a fixture's tensors and configuration, or changed ones."""
    folder.mkdir()
    save_file(tensors_of(name) if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields_of(name, **change)))
    return folder


def refused(folder):
    """The report with which a folder of wrong keys or shapes is refused."""
    with pytest.raises(models.KeyMismatchError) as caught:
        models.load(folder)
    return str(caught.value)
