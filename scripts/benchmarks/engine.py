"""What bench_engine.py times: analysis, import, and a call beyond its compiled program."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx

import pbjax
from models import BertConfig, BertModel
from pbjax.device import find_device
from pbjax.program.analysis import analyse

IMPORTS = (
    "import time, jax; start = time.perf_counter(); import pbjax.pipeline; "
    "print(time.perf_counter() - start)"
)


def run(repeats: int) -> None:
    """Measures the three and prints them."""
    conditions = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
        "repeats": repeats,
    }
    found = {
        "analyse_bert_base_s": statistics.median(analyse_bert() for _ in range(repeats)),
        "import_beyond_jax_s": statistics.median(import_pbjax() for _ in range(repeats)),
        "call_overhead_us": 1e6 * call_overhead(),
    }
    print(", ".join(f"{name} {value}" for name, value in conditions.items()))
    print(json.dumps({"bench": "engine", **conditions, **found}))


def analyse_bert() -> float:
    """Seconds to take BERT-Base apart; its weights are shapes only."""
    model = nnx.eval_shape(lambda: BertModel(BertConfig.base(), rngs=nnx.Rngs(0)))
    ids = jax.ShapeDtypeStruct((96, 384), jnp.int32)
    start = time.perf_counter()
    analyse(model, (ids, ids), device=find_device("NVIDIA H200"))
    return time.perf_counter() - start


def import_pbjax() -> float:
    """Seconds that a new process takes to import pbjax once jax is there."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def call_overhead(calls: int = 2000) -> float:
    """Host seconds of a call of Optimized beyond a call of its compiled program."""
    params = [jnp.ones((8, 8)) * 0.1 for _ in range(16)]

    def model(x, mask):
        for w in params:
            x = jnp.tanh(x @ w) * mask
        return x

    x = jnp.ones((4, 8))
    fast = pbjax.optimize(model, x, x, split=(4,))
    bucket = fast._buckets[4]
    both = []
    for function, args in ((fast, (x, x)), (bucket.program, (bucket.weights, x, x))):
        samples = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(calls):
                out = function(*args)
            samples.append((time.perf_counter() - start) / calls)
            jax.block_until_ready(out)
        both.append(statistics.median(samples))
    return both[0] - both[1]
