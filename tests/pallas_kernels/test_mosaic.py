"""Mosaic is loaded when a kernel is first traced, and lowers kernels without their numbers."""

import subprocess
import sys

PROGRAM = """
import sys
import pbjax.pipeline
import pallas_kernels.corun, pallas_kernels.relaunch
print("jax.experimental.mosaic.gpu" in sys.modules)

import jax.numpy as jnp
import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from pallas_kernels.norm import rms_norm

x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
device = AbstractDevice("NVIDIA H200", 132, "cuda")
with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
    traced = jax.jit(lambda x, s: rms_norm(x, s, eps=1e-6)).trace(x, x.update(shape=(256,)))
from jax.experimental.mosaic.gpu import core
print(core._run_serde_pass.__module__)
"""


def test_mosaic_is_loaded_with_the_first_kernel_and_numbers_none():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "pallas_kernels.numbering"], done.stderr
