"""The command line of rooflines: what it prints, what it refuses, what it loads."""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from typer.testing import CliRunner

from pbjax.cli.app import app
from pbjax.cli.subject import find_subject
from pbjax.device import find_device
from pbjax.planning.ceilings import calibrated
from tests.shapes import long_gpt2

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True, scope="module")
def _traced_once():
    """Commands that ask the same of the same model share its reports, as phases of one do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pbjax.cli.roofline.find_subject", cache(find_subject))
        yield


def run(*arguments):
    return CliRunner().invoke(app, ["roofline", *map(str, arguments)])


def printed(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_prefill_and_decode_are_apart():
    text = printed(DATA / "gpt2", "--device", "nvidia-h200", "--batch", 2, "--seq", 12)
    assert "gpt2, prefill (batch 2, 24 tokens in), bfloat16, attention fused" in text
    assert "gpt2, decode (batch 2, 2 tokens in, 12 cached a row), bfloat16, attention fused" in text
    ridge = calibrated(find_device("NVIDIA H200")).ridge_point("bfloat16")
    assert f"ridge point {ridge:.0f} FLOP/byte" in " ".join(text.split())
    assert "measured ceilings" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100


def test_one_layer_is_one_layer():
    text = printed("gpt2", "--device", "h200", "--layers", 1, "--phase", "decode", "--seq", 8)
    assert text.startswith("gpt2, 1 layer, decode (batch 1, 1 token in, 8 cached a row), bfloat16")


@pytest.mark.timeout(60)
def test_a_hundred_thousand_layers_are_not_traced_one_by_one():
    asked = ("--device", "h200", "--phase", "decode", "--seq", 8, "--layers")
    result = run("gpt2", *asked, 100_000, "--json")
    (report,) = json.loads(result.stdout)["reports"]
    assert {row["repeats"] for row in report["stages"]} == {1, 100_000}
    assert "too little for any batch" in result.stderr
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("model", "phase", "seq", "kernels"),
    [
        ("gpt2", "prefill", 8, False),
        ("gpt2", "decode", 8, True),
        ("conformer-large", "forward", 4000, True),
    ],
)
def test_a_deep_model_costs_what_it_does_traced_whole(model, phase, seq, kernels):
    subject = find_subject(model, find_device("h200"), "bfloat16", "fused", layers=6)
    subject = replace(subject, kernels=kernels)
    whole = replace(subject, shape=subject.shape.with_layers(6), num_layers=None)
    drawn, traced = (each.report(phase, 2, seq) for each in (subject, whole))
    assert subject.shape.config.num_layers < 6
    assert drawn.memory == traced.memory
    for found, expected in zip(drawn.points, traced.points, strict=True):
        figures, same = asdict(found), asdict(expected)
        assert figures.pop("traffic") == pytest.approx(same.pop("traffic"))
        words = ("stage", "name", "kind", "dtype")
        assert [figures.pop(n) for n in words] == [same.pop(n) for n in words]
        assert figures == pytest.approx(same)


def test_of_a_preset_with_many_layers_few_are_traced():
    subject = find_subject("gpt2", find_device("h200"), "bfloat16", "fused", layers=None)
    assert (subject.name, subject.num_layers) == ("gpt2", 12)
    assert subject.shape.config.num_layers < 12


def test_peaks_of_the_datasheet_stay_available():
    common = (DATA / "gpt2", "--device", "nvidia-h200", "--phase", "decode", "--seq", 12)
    text = printed(*common, "--peaks", "datasheet")
    assert "989 TFLOP/s" in text
    assert "ridge point 206 FLOP/byte" in " ".join(text.split())
    assert "datasheet" in text


def test_sizes_beyond_all_memory_are_an_error_with_the_sizes():
    result = run(DATA / "gpt2", "--device", "h200", "--batch", 10**18, "--seq", 12)
    assert result.exit_code == 1
    # Of a row 2 layers x keys and values x 12 tokens x 32 of 2 bytes, and its length of 4.
    assert "prefill at batch 1000000000000000000 needs" in result.stderr
    assert "3,076,000,000,000.0 KV cache" in result.stderr


@pytest.mark.parametrize(
    ("model", "sizes", "stages"),
    [
        ("llama3-8b", ("--layers", 2, "--phase", "prefill", "--batch", 8, "--seq", 1024), {"head"}),
        ("llama3-8b", ("--layers", 2, "--phase", "decode", "--batch", 128, "--seq", 1024), set()),
        ("llama3-8b", ("--layers", 2, "--phase", "decode", "--batch", 512, "--seq", 1024), set()),
        ("vit-base", ("--layers", 4, "--batch", 256), {"embeddings"}),
        ("bert-base", ("--batch", 96, "--seq", 384), set()),
    ],
)
def test_predicted_stages_are_within_15_percent_of_measured_on_an_h200(model, sizes, stages):
    table = Path(__file__).parents[2] / "profiles" / "nvidia_h200" / "roofline_stages.json"
    text = printed(model, "--device", "h200", *sizes, "--measured", table, "--json")
    checks = json.loads(text)["checks"]
    assert {"attention", "mlp"} | stages <= {check["stage"] for check in checks}
    assert all(abs(check["error"]) < 0.15 for check in checks), checks


def test_json_is_one_document_with_all_phases():
    text = printed(DATA / "gpt2", "--device", "h200", "--batch", 2, "--seq", 12, "--json")
    reports = json.loads(text)["reports"]
    assert [r["phase"] for r in reports] == ["prefill", "decode"]
    assert all(
        sum(s["seconds"] for s in r["stages"]) == pytest.approx(r["total"]["seconds"])
        for r in reports
    )
    assert reports[1]["total"]["bound"] == "memory"


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "conformer"])
def test_a_folder_needs_no_weights(name, tmp_path):
    (tmp_path / "config.json").write_text((DATA / name / "config.json").read_text())
    sizes = {"vit": (), "conformer": ("--seq", 4000)}.get(name, ("--seq", 12))
    text = printed(tmp_path, "--device", "l40s", *sizes)
    assert "NVIDIA L40S" in text


def test_study_and_what_if_answer_in_words_and_in_json(tmp_path):
    folder = long_gpt2(tmp_path / "small")
    arguments = (folder, "--device", "a100-sxm4-80gb", "--batch", 2, "--seq", 128)
    options = ("--study", "--latency-ms", 5, "--what-if", "--draft", folder)
    text = printed(*arguments, "--phase", "decode", *options)
    for words in (
        "critical batch",
        "largest batch that fits",
        "chosen: batch",
        "weights in 4 bits",
        "KV cache in 8 bits",
        "attention unfused",
        "tensor parallel over 2",
        "break-even",
    ):
        assert words in text
    assert "FP8" not in text  # an A100 has none
    assert max(map(len, text.splitlines())) <= 100
    data = json.loads(printed(*arguments, "--phase", "decode", *options, "--json"))
    assert data["studies"][0]["choice"]["chosen"]["seconds"] <= 0.005
    assert data["what_if"][1]["speculation"]["batches"][0]["batch_size"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nothing", "--device", "h200"), 2, "presets are"),
        (("gpt2", "--device", "abacus"), 2, "pbjax roofline --device abacus: no figures of such"),
        (("gpt2", "--device", ""), 2, "pbjax roofline --device '': no figures of such a device"),
        (("gpt2", "--device", "a100"), 2, "a100-sxm4-80gb and nvidia-a100-sxm4-40gb are allowed"),
        (("gpt2", "--device", "h200"), 2, "seq is missing"),
        (("gpt2", "--device", "h200", "--seq", 2000), 2, "1 to 1024"),
        (("vit-base", "--device", "h200", "--seq", 7), 2, "leave it out"),
        (
            ("minilm", "--device", "h200", "--seq", 8, "--phase", "decode"),
            2,
            "unknown phase 'decode'",
        ),
        (("minilm", "--device", "h200", "--seq", 8, "--study"), 2, "generates"),
        (("gpt2", "--device", "h200", "--seq", 8, "--latency-ms", 5), 2, "add --study"),
        (("gpt2", "--device", "h200", "--seq", 8, "--draft", "gpt2"), 2, "add --what-if"),
        (("minilm", "--device", "h200", "--seq", 8, "--dtype", "int3"), 2, "supported are"),
        ((DATA / "gpt2", "--device", "rtx 4090", "--seq", 12, "--batch", 10**9), 1, "24.0 GB"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, code, words):
    result = run(*arguments)
    assert result.exit_code == code
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line


@pytest.fixture
def untraced(monkeypatch):
    monkeypatch.setattr("pbjax.roofline.report.trace", lambda *_: pytest.fail("it was traced"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--what-if", "--draft", "nothing"), "nothing: no such folder or preset"),
        (("--what-if", "--draft", "minilm"), "--draft minilm: minilm does not decode"),
        (("--what-if", "--draft", DATA / "gpt2"), "seq is 512; 1 to"),
        (("--phase", "forward", "--study"), "--study: it has the phase forward"),
        (("--measure", "--measure-seq", 2000), "seq is 2000; 1 to 1024"),
        (("--phase", "decode", "--save-measured", "a.json"), "add --measure"),
        (("--html", ""), "it is empty"),
        (("--figures", ""), "it is empty"),
    ],
)
def test_what_arguments_decide_is_refused_before_the_model_is_traced(untraced, options, words):
    device = () if "--measure" in options else ("--device", "h200")
    result = run("gpt2", *device, "--seq", 512, *options)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_a_machine_without_figures_is_told_to_name_a_device(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="Abacus 9")])
    result = run("gpt2", "--seq", 8)
    assert result.exit_code == 1
    assert "the first device of JAX is 'Abacus 9', of which no figures" in result.stderr
    assert result.stderr.endswith("and cpu; name one of them by --device\n")


def test_a_batch_that_does_not_fit_shows_its_figures():
    asked = ("--layers", 8, "--phase", "decode", "--batch", 2048, "--seq", 1024)
    result = run("llama3-8b", "--device", "l40s", *asked)
    assert result.exit_code == 1
    assert "DOES NOT FIT" in result.stdout.replace("\n  ", " ")
    assert "5.6 weights, 68.7 KV cache, 0.0 inputs" in result.stderr
    # 48 GB less 5.6 of weights, at 33.6 MB of cache and 0.26 of what is computed a row.
    assert "NVIDIA L40S has 48.0 GB, enough for batch 1,253" in result.stderr


def test_a_model_that_no_batch_fits_says_so():
    asked = ("--layers", 24, "--phase", "decode", "--seq", 128, "--dtype", "float32")
    result = run("llama3-8b", "--device", "rtx-4090", *asked)
    assert result.exit_code == 1
    assert "25.1 weights" in result.stderr
    assert "24.0 GB, too little for any batch" in result.stderr


@pytest.mark.parametrize("option", ["save-measured", "figures", "html"])
def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_traced(
    option, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("pbjax.cli.roofline.find_subject", lambda *_: pytest.fail("it began"))
    result = run(DATA / "gpt2", "--seq", 12, "--measure", f"--{option}", tmp_path / "file" / "in")
    assert result.exit_code == 2
    assert f"--{option} {tmp_path}" in result.stderr
    assert "can be written is allowed" in result.stderr


def test_a_study_of_a_model_with_few_positions_is_refused_with_the_way_out():
    result = run(DATA / "gpt2", "--device", "h200", "--seq", 12, "--study")
    assert result.exit_code == 2
    assert "0 of the lengths fit the model; 3 lengths of 64 tokens or more" in result.stderr
