"""What bench_loading.py measures: a sharded folder is made, loaded, and its memory watched."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import models
from models.keymap import abstract_parameters
from models.llama.checkpoint import FAMILY

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
CASES = {"bfloat16": "bfloat16", "float32": "float32", "converted": "float32"}


def run(options: argparse.Namespace) -> None:
    """Makes the folder, or measures one case of it in this process."""
    if options.measure:
        print(json.dumps(measure(Path(options.measure[0]), options.measure[1])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "hf")
        shards = make(folder, options.layers, options.shard_mb * 10**6)
        models.convert(folder, Path(temporary, "converted"), report=lambda line: None)
        for case, dtype in CASES.items():
            source = Path(temporary, "converted") if case == "converted" else folder
            report(case, run_case(source, dtype), shards)


def make(folder: Path, num_layers: int, shard_bytes: int) -> list[int]:
    """Writes the folder; returns the sizes of its shards in bytes."""
    folder.mkdir()
    fields = SIZES | {"model_type": "llama", "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(fields))
    config = FAMILY.parse(fields, "config.json")
    shapes = abstract_parameters(nnx.eval_shape(lambda: FAMILY.build(config, "bfloat16")))
    shards, sizes, weight_map = [{}], [0], {}
    for leaf in FAMILY.leaves(config):
        shape = leaf.stored_shape(shapes[leaf.path])
        size = 2 * int(np.prod(shape))
        if sizes[-1] + size > shard_bytes:
            shards.append({})
            sizes.append(0)
        key = f"model.{leaf.key}" if leaf.key.split(".")[0] in FAMILY.base else leaf.key
        shards[-1][key], sizes[-1] = shape, sizes[-1] + size
    generator = np.random.default_rng(0)
    for number, shapes_of_shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        row = (0.02 * generator.standard_normal(2**20)).astype(ml_dtypes.bfloat16)
        tensors = {key: np.resize(row, shape) for key, shape in shapes_of_shard.items()}
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sizes


def run_case(folder: Path, dtype: str) -> dict[str, float]:
    """Measures one case in a process of its own."""
    command = [sys.executable, sys.argv[0], "--measure", str(folder), dtype]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def measure(folder: Path, dtype: str) -> dict[str, float]:
    """Loads a folder; returns bytes and seconds."""
    jax.block_until_ready(jax.numpy.zeros(8).T)
    before, own_before = status("VmHWM"), status("RssAnon")
    own = [own_before]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            own.append(status("RssAnon"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    start = time.perf_counter()
    module = models.load(folder, dtype)
    jax.block_until_ready(nnx.state(module))
    seconds = time.perf_counter() - start
    done.set()
    sampler.join()
    leaves = jax.tree.leaves(nnx.state(module))
    return {
        "parameters_bytes": sum(leaf.nbytes for leaf in leaves),
        "peak_bytes": status("VmHWM") - before,
        "own_peak_bytes": max(own) - own_before,
        "seconds": seconds,
    }


def status(name: str) -> int:
    """Returns a figure of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def report(case: str, found: dict[str, float], shards: list[int]) -> None:
    """Prints one case."""
    largest, parameters = max(shards), found["parameters_bytes"]
    beside, own = (found[name] - parameters for name in ("peak_bytes", "own_peak_bytes"))
    line = {
        "bench": "loading",
        "case": case,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "cores": os.cpu_count(),
        "shards": len(shards),
        "largest_shard_bytes": largest,
        "parameters_bytes": parameters,
        "beside_bytes": beside,
        "beside_over_largest_shard": round(beside / largest, 3),
        "own_beside_over_largest_shard": round(own / largest, 3),
        "gb_per_s": round(parameters / found["seconds"] / 1e9, 2),
    }
    print(json.dumps(line), flush=True)
