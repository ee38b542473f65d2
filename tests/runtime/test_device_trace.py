"""Traces of a profiler: which events are kernels, and how much of them coincides."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbjax.errors import FileError
from pbjax.runtime.device_trace import Kernel, kernels_of, overlap, read_kernels, union_length

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda p: (float(p[0]), float(sum(p)))),
    max_size=12,
)
GEMM, NORM = "pbjax_gemm_mosaic_gpu_kernel_0", "pbjax_layer_norm_mosaic_gpu_kernel_1"


def meta(kind, pid, name, **tid):
    return {"ph": "M", "pid": pid, "name": kind, "args": {"name": name}, **tid}


def launch(name, start_us, duration_us, pid=1, tid=20):
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": duration_us,
        "name": name,
        "args": {"correlation_id": "7", "hlo_module": "jit_step", "hlo_op": "command_buffer_1"},
    }


# As jax 0.11 writes it: names of processes and threads, host events, lines that XLA derives, `{}`.
EVENTS = [
    meta("process_name", 1, "/device:GPU:0"),
    meta("process_name", 701, "/host:CPU"),
    meta("thread_name", 1, "Stream #20(Compute)", tid=20),
    meta("thread_name", 1, "Stream #21(Compute)", tid=21),
    meta("thread_name", 1, "XLA Ops", tid=30),
    meta("thread_name", 701, "Stream of thoughts", tid=9),
    launch(NORM, 130.0, 40.0, tid=21),
    launch(GEMM, 100.0, 50.0),
    launch("all of it", 100.0, 80.0, tid=30),
    launch("PjitFunction", 0.0, 500.0, pid=701, tid=9),
    {},
]


def write(folder, content):
    path = folder / "plugins" / "vm.trace.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_kernels_are_the_events_of_the_gpus_streams_by_their_starts(tmp_path):
    write(tmp_path, gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    gemm, norm = read_kernels(tmp_path)
    assert (gemm.name, norm.name) == (GEMM, NORM)
    assert gemm.start_s == pytest.approx(1e-4)
    assert norm.end_s == pytest.approx(1.7e-4)
    assert gemm.program == norm.program == "jit_step"


def test_kernel_of_which_the_trace_names_no_program_has_none():
    events = [{**event, "args": {}} if event.get("name") == GEMM else event for event in EVENTS]
    assert [kernel.program for kernel in kernels_of(events)] == ["", "jit_step"]


def test_overlap_of_known_kernels():
    found = overlap(kernels_of(EVENTS))
    assert found.tensor_s == pytest.approx(50e-6)
    assert found.memory_s == pytest.approx(40e-6)
    assert found.both_s == pytest.approx(20e-6)
    assert found.span_s == pytest.approx(70e-6)
    assert found.share == pytest.approx(0.5)


@given(INTERVALS, INTERVALS)
def test_overlap_counts_the_moments_in_which_one_of_each_runs(tensor, memory):
    kernels = [Kernel(name=GEMM, start_s=a, end_s=b) for a, b in tensor]
    kernels += [Kernel(name=NORM, start_s=a, end_s=b) for a, b in memory]
    found = overlap(kernels)
    sets = [{m for a, b in part for m in range(int(a), int(b))} for part in (tensor, memory)]
    assert (found.tensor_s, found.memory_s) == (len(sets[0]), len(sets[1]))
    assert found.both_s == len(sets[0] & sets[1])
    assert 0 <= found.share <= 1


def test_nothing_overlaps_in_an_empty_trace():
    assert overlap(()).share == 0.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (GEMM, True),
        ("nvjet_sm90_tst_128x128_64x6_2x1_v_bz_bias_NNT", True),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", True),
        ("pbjax_attention_mosaic_gpu_kernel", True),
        ("pbjax_decode_attention_mosaic_gpu_kernel", False),
        ("pbjax_gemm_beside_decode_attention_mosaic_gpu_kernel", True),
        (NORM, False),
        ("loop_convert_fusion", False),
        ("loop_add_fusion_3", False),
        ("MemcpyD2D", False),
    ],
)
def test_kernels_of_the_tensor_cores_are_known_by_name(name, expected):
    assert Kernel(name=name, start_s=0.0, end_s=1.0).uses_tensor_cores is expected


@given(INTERVALS)
def test_union_counts_every_moment_once(intervals):
    moments = {m for start, end in intervals for m in range(int(start), int(end))}
    assert union_length(intervals) == len(moments)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no gzip",
        gzip.compress(b"{}"),
        gzip.compress(b"[1"),
        gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())[:-9],
        gzip.compress(json.dumps({"traceEvents": [{"ph": "X", "name": "a"}]}).encode()),
        gzip.compress(json.dumps({"traceEvents": [1]}).encode()),
        gzip.compress(json.dumps({"traceEvents": ["a"]}).encode()),
        gzip.compress(
            json.dumps({"traceEvents": [*EVENTS, meta("process_name", 1, None)]}).encode()
        ),
    ],
    ids=[
        "empty",
        "plain",
        "object",
        "open",
        "cut",
        "no times",
        "number",
        "text",
        "unnamed",
    ],  # Bytes hold the date.
)
def test_file_that_is_no_trace_is_refused(tmp_path, content):
    path = write(tmp_path, content)
    with pytest.raises(FileError, match="whole Chrome trace") as error:
        read_kernels(path)
    assert str(error.value).count(";") >= 2


def test_folder_without_a_trace_or_with_two_is_refused(tmp_path):
    with pytest.raises(FileError, match="0 traces"):
        read_kernels(tmp_path)
    (tmp_path / "a.trace.json.gz").touch()
    (tmp_path / "b.trace.json.gz").touch()
    with pytest.raises(FileError, match="2 traces"):
        read_kernels(tmp_path)


@pytest.mark.long
def test_trace_that_jax_writes_is_read_and_has_no_kernels_on_a_cpu(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(jnp.ones(8) + 1)
    assert read_kernels(tmp_path) == ()
