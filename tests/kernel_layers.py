"""The three ways to test a Mosaic GPU kernel without a GPU; pytest does not collect this file.

Interpreter with its race detector; lowering for an H200; ahead-of-time compilation to SASS in a
process of its own (`python tests/kernel_layers.py gemm` prints what ptxas says about the launches
of tests/pallas_kernels/test_gemm.py)."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "tests" / "data" / "h200.txtpb"
SERIALISED = {"C7510", "C7511", "C7512", "C7513", "C7514"}  # ptxas: WGMMA waits for each other.


def interpreted(function, *args):
    """Runs function in the interpreter; fails on a race."""
    import jax
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            results = jax.block_until_ready(jax.jit(function)(*args))
        assert not interpreter.get_races().races_found
        return results
    finally:
        interpreter.reset_gpu_interpret_mode_state()


def lowered(function, *args) -> str:
    """The program's text for an H200."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    h200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
    with use_abstract_mesh(h200):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def has_cuda_plugin() -> bool:
    """Whether kernels can be compiled ahead of time here: jax's CUDA plugin, and the compiler
    wheels it calls."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def ptxas_reports(kernel: str) -> dict[str, dict]:
    """What ptxas says about each launch in LAUNCHES of a kernel's test module, compiled in another
    process."""
    done = subprocess.run(
        [sys.executable, __file__, kernel], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_clean(report: dict) -> None:
    """One launch or more, no spilled register, no serialised WGMMA."""
    assert report["kernels"]
    assert not any(spilled for _, spilled in report["kernels"])
    assert not SERIALISED & set(report["codes"])


def _main(kernel: str) -> None:
    os.environ.update(
        JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_PTXAS="1"
    )
    sys.path.insert(0, str(ROOT))
    import jax
    from jax.experimental import topologies

    launches = importlib.import_module(f"tests.pallas_kernels.test_{kernel}").launches()
    # With these set, compiling any Mosaic kernel without a GPU ends in a segmentation fault.
    for name in ("MOSAIC_GPU_NVSHMEM_BC_PATH", "MOSAIC_GPU_NVSHMEM_SO_PATH"):
        os.environ.pop(name, None)
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=TARGET.read_text()
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    reports = {}
    for name, (function, args) in launches.items():
        specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device) for a in args]
        reports[name] = _report(lambda f=function, s=specs: jax.jit(f).lower(*s).compile())
    print(json.dumps(reports))


def _report(compile_it) -> dict:
    """Runs compile_it and reads what ptxas wrote to the C-level standard output."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 1)
        try:
            compile_it()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        log.seek(0)
        text = log.read().decode()
    found = re.findall(
        r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n.*?Used (\d+) registers",
        text,
    )
    return {
        "kernels": [(int(r), int(s) + int(loaded)) for s, loaded, r in found],
        "codes": sorted(set(re.findall(r"\((C75\d\d)\)", text))),
    }


if __name__ == "__main__":
    _main(sys.argv[1])
