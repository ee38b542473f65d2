"""Measured stages beside predicted ones: attribution of instructions, real runs on this machine."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from models.presets import find_shape
from pbjax.cli.app import app
from pbjax.device import find_device
from pbjax.errors import DeviceError, FileError, InputError
from pbjax.roofline import measure as roofline_measure
from pbjax.roofline.measure import instruction_stages
from pbjax.roofline.measured_table import MeasuredTable, Row, checks_text, stage_checks
from pbjax.roofline.report import roofline_report
from tests.fakes import provenance
from tests.shapes import long_gpt2

DATA = Path(__file__).parents[1] / "data"
CPU = find_device("cpu", num_cores=2)
HLO = """
%fused_computation (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %dot.1 = f32[2]{0} dot(%p, %p), metadata={op_name="jit(f)/pbjax_stage_3/dot_general"}
  ROOT %tanh.1 = f32[2]{0} tanh(%dot.1), metadata={op_name="jit(f)/pbjax_stage_4/tanh"}
}

%fused_computation.1 (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %a = f32[2]{0} add(%p, %p), metadata={op_name="jit(f)/pbjax_stage_5/add"}
  %b = f32[2]{0} add(%a, %p), metadata={op_name="jit(f)/pbjax_stage_5/add"}
  ROOT %c = f32[2]{0} sine(%b), metadata={op_name="jit(f)/pbjax_stage_6/sin"}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %fusion.1 = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused_computation, \
metadata={op_name="jit(f)/pbjax_stage_4/tanh"}
  %fusion.2 = f32[2]{0} fusion(%fusion.1), kind=kLoop, calls=%fused_computation.1
  %copy.1 = f32[2]{0} copy(%fusion.2)
  ROOT %exp = f32[2]{0} exponential(%copy.1), metadata={op_name="jit(f)/pbjax_stage_7/exp"}
}
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Measures no longer than it takes to see that it is measured."""
    monkeypatch.setattr(roofline_measure, "WARM_S", 0.01)
    monkeypatch.setattr(roofline_measure, "TRACED_S", 0.01)


def test_a_fusion_belongs_to_its_product_then_its_result_then_most_of_it():
    owners = instruction_stages(HLO)
    assert owners["fusion.1"] == 3
    assert owners["fusion.2"] == 5
    assert owners["exp"] == 7
    assert "copy.1" not in owners


# As XLA prints a product of one row, whose sum over K it splits.
SPLIT = """
%gemm_fusion_dot.5_computation (p0: bf16[8,768,1], p1: bf16[8,768,64]) -> f32[8,1,64] {
  %p1 = bf16[8,768,64]{2,1,0} parameter(1)
  %p0 = bf16[8,768,1]{2,1,0} parameter(0)
  %sin.2 = bf16[8,768,1]{2,1,0} sine(%p0), metadata={op_name="jit(f)/pbjax_stage_6/sin"}
  ROOT %dot.9 = f32[8,64,1]{1,2,0} dot(%p1, %sin.2), lhs_batch_dims={0}, rhs_batch_dims={0}
}

%fused_reduce (p: f32[8,1,64]) -> bf16[1,64] {
  %p = f32[8,1,64]{2,1,0} parameter(0)
  ROOT %reduce.2 = bf16[1,64]{1,0} reduce(%p), dimensions={0}
}

ENTRY %main (x: bf16[1,6144], w: bf16[6144,64]) -> bf16[1,64] {
  %x.1 = bf16[1,6144]{1,0} parameter(0), metadata={op_name="kept[0]" scheduling_name="x.1"}
  %w.1 = bf16[6144,64]{1,0} parameter(1), metadata={op_name="kept[1]" scheduling_name="w.1"}
  %copy.1 = bf16[1,6144]{1,0} copy(%x.1), metadata={op_name="jit(f)/pbjax_stage_2/copy"}
  %bitcast.2 = bf16[8,768,64]{2,1,0} bitcast(%w.1)
  %bitcast.3 = bf16[8,768,1]{2,1,0} bitcast(%copy.1)
  %gemm_fusion_dot.5 = f32[8,1,64]{2,1,0} fusion(%bitcast.3, %bitcast.2), kind=kCustom, \
calls=%gemm_fusion_dot.5_computation, backend_config={"kind":"(nested)"}
  ROOT %loop_reduce_fusion = bf16[1,64]{1,0} fusion(%gemm_fusion_dot.5), calls=%fused_reduce
}
"""


def test_a_product_that_lost_its_scope_belongs_to_what_reads_its_weights():
    owners = instruction_stages(SPLIT, {"kept[1]": 8})
    assert owners["gemm_fusion_dot.5"] == 8
    assert owners["loop_reduce_fusion"] == 8
    assert owners["copy.1"] == 2
    unknown = instruction_stages(SPLIT)
    assert unknown["gemm_fusion_dot.5"] == 6
    assert "loop_reduce_fusion" not in unknown


def model(x, w):
    with jax.named_scope("small"):
        y = x + 1
    with jax.named_scope("large"):
        for _ in range(4):
            y = jnp.tanh(y @ w)
        return y


def test_stages_are_measured_and_the_large_one_takes_longer():
    x, w = jnp.ones((256, 256)), jnp.ones((256, 256))
    report = roofline_report(model, x, w, device=CPU, weights=(1,), measure=True)
    measured = report.measured
    assert set(measured.stages) == {"small", "large"}
    assert measured.stages["large"] > measured.stages["small"]
    assert measured.seconds > 0
    whole = sum(measured.stages.values())
    assert sum(measured.kinds.values()) == pytest.approx(whole)
    assert sum(measured.groups.values()) == pytest.approx(whole)
    assert set(measured.groups) == {f"{point.stage}/{point.name}" for point in report.points}
    assert "error" in checks_text(report)


def test_each_group_of_a_stage_has_its_achieved_rate():
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.sort(x @ w, axis=1)

    x, w = jnp.ones((256, 256)), jnp.ones((256, 256))
    report = roofline_report(layer, x, w, device=CPU, weights=(1,), measure=True)
    (check,) = stage_checks(report)
    assert len(check.groups) == len(report.points) == 2
    assert sum(group.measured_s for group in check.groups) == pytest.approx(check.measured_s)
    product = max(check.groups, key=lambda group: group.stage.flops)
    assert product.flops_per_s == product.stage.flops / product.measured_s
    names = [line.split()[0] for line in checks_text(report).splitlines() if line[:2] == "  "]
    assert product.stage.name in names
    assert check.row()["groups"] == [group.row() for group in check.groups]


def test_stages_inside_a_loop_are_measured_apart():
    def looped(x, w):
        def body(c, v):
            with jax.named_scope("product"):
                c = c @ v
            with jax.named_scope("second"):
                return c, jnp.sort(c, axis=1)

        return jax.lax.scan(body, x, jnp.stack([w, w]), reverse=True)

    x, w = jnp.ones((64, 64)), jnp.eye(64)
    report = roofline_report(looped, x, w, device=CPU, measure=True)
    assert report.measured.stages["product"] > 0
    assert report.measured.stages["second"] > 0


def test_a_cache_is_updated_in_place():
    def step(token, cache):
        cache = jax.lax.dynamic_update_slice(cache, token, (0, 3))
        return cache.sum(), cache

    token, cache = jnp.ones((8, 1)), jnp.zeros((8, 16))
    report = roofline_report(step, token, cache, device=CPU, cache=(1,), measure=True)
    assert report.measured.seconds > 0
    assert cache.is_deleted()
    assert not token.is_deleted()


def test_random_inputs_fill_a_cache_but_for_the_new_token():
    shape = find_shape(str(DATA / "gpt2"), "float32", 1)
    ids, cache = shape.values(shape.call("decode", 2, 8))
    assert list(cache.lengths) == [7, 7]
    assert ids.shape == (2, 1)
    _, lengths, _ = shape.values(shape.call("prefill", 2, 8))
    assert list(lengths) == [8, 8]


def test_the_device_is_measured_in_its_turn():
    entered = []

    @contextmanager
    def turn():
        entered.append(True)
        yield

    x = jnp.ones((8, 8))
    roofline_report(model, x, x, device=CPU, measure=True, turn=turn())
    assert entered == [True]


def test_shapes_cannot_be_measured():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(InputError, match="arrays are needed"):
        roofline_report(model, x, x, device=CPU, measure=True)


def test_another_device_cannot_be_measured():
    x = jnp.ones((8, 8))
    with pytest.raises(DeviceError, match="only that can be measured"):
        roofline_report(model, x, x, device=find_device("NVIDIA H200"), measure=True)


def test_a_trace_without_instructions_is_refused(monkeypatch):
    monkeypatch.setattr(roofline_measure, "_trace", lambda *_: None)
    monkeypatch.setattr(
        roofline_measure, "_read", lambda _: jax.profiler.ProfileData.from_serialized_xspace(b"")
    )
    with pytest.raises(DeviceError, match="names no instruction"):
        roofline_report(model, jnp.ones((8, 8)), jnp.ones((8, 8)), device=CPU, measure=True)


def saved(report, path, device_kind="cpu"):
    where = provenance(device_kind=device_kind, commit="", date="2026-11-29")
    row = Row(
        model=report.model,
        phase=report.phase,
        items=report.items,
        tokens=report.tokens,
        cached=0,
        measured=report.measured,
    )
    MeasuredTable(provenance=where, rows=(row,)).save(path)


def test_a_table_keeps_what_was_measured(tmp_path):
    x = jnp.ones((64, 64))
    report = roofline_report(model, x, x, device=CPU, weights=(1,), measure=True)
    saved(report, tmp_path / "stages.json")
    table = MeasuredTable.load(tmp_path / "stages.json")
    assert table.attached(replace(report, measured=None)).measured == report.measured
    with pytest.raises(InputError, match="not in the table"):
        table.attached(replace(report, items=7))


def test_a_corrupt_table_is_refused(tmp_path):
    (tmp_path / "stages.json").write_text('{"schema_version": 1}')
    with pytest.raises(FileError, match="table"):
        MeasuredTable.load(tmp_path / "stages.json")


def test_errors_are_of_the_prediction_and_short_stages_are_left_out():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    report = roofline_report(model, x, x, device=CPU, weights=(1,))
    (large,) = [stage for stage in report.stages if stage.name == "large"]
    measured = roofline_measure.Measured(
        device_kind="cpu",
        seconds=1.0,
        stages={"small": 1e-9, "large": 2 * large.seconds},
        kinds={},
        other_s=0.0,
        calls=1,
    )
    (check,) = stage_checks(replace(report, measured=measured))
    assert check.stage.name == "large"
    assert check.error == pytest.approx(-0.5)
    assert check.flops_per_s == pytest.approx(large.flops / (2 * large.seconds))


def test_the_command_measures_saves_and_compares(tmp_path):
    table = tmp_path / "stages.json"
    common = [
        str(DATA / "gpt2"),
        "--layers",
        "1",
        "--dtype",
        "float32",
        "--batch",
        "2",
        "--seq",
        "8",
        "--json",
    ]
    runner = CliRunner()
    first = runner.invoke(app, ["roofline", *common, "--measure", "--save-measured", str(table)])
    assert first.exit_code == 0, first.stderr
    found = json.loads(first.stdout)
    assert {row["phase"] for row in found["checks"]} == {"prefill", "decode"}
    second = runner.invoke(app, ["roofline", *common, "--measured", str(table)])
    assert second.exit_code == 0, second.stderr
    assert json.loads(second.stdout)["checks"] == found["checks"]


def test_further_batches_and_lengths_are_measured_for_the_curves(tmp_path):
    table = tmp_path / "stages.json"
    sizes = ["--dtype", "float32", "--phase", "decode", "--batch", "2", "--seq", "128"]
    folder = long_gpt2(tmp_path / "small")
    command = ["roofline", str(folder), "--layers", "1", *sizes, "--study", "--json"]
    options = ["--measure", "--measure-batch", "4", "--measure-seq", "256"]
    options += ["--save-measured", str(table)]
    result = CliRunner().invoke(app, [*command, *options])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    sizes = [(point["batch_size"], point["seq_len"]) for point in found["measured_points"]]
    assert sizes == [(2, 128), (4, 128), (2, 256)]
    rows = MeasuredTable.load(table).rows
    assert [(row.items, row.cached) for row in rows] == sizes
    assert len(found["reports"]) == 1


def test_the_command_measures_no_device_that_is_not_here():
    command = ["roofline", "gpt2", "--seq", "8", "--measure", "--device", "nvidia-h200"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 or result.exit_code == 2
    assert "only that can be measured" in result.stderr
