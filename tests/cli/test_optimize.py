"""`pbjax optimize` from end to end on tiny models, and what it refuses before it loads any."""

import json
import re
import shutil
import sys
import textwrap
import wave
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from PIL import Image
from typer.testing import CliRunner

import models
from pbjax.cli.app import app
from pbjax.cli.batch_options import read_batch
from pbjax.errors import InputError, VerificationError
from pbjax.planning.plan import Plan, Seconds
from pbjax.planning.profiling import Profile, Timing
from tests.fakes import FakeTimer

DATA = Path(__file__).parents[1] / "data"
WORDS = ("the", "cat", "dog", "sat", "ran", "on", "a", "mat", "tree", "fast")
SENTENCES = ("The cat sat on a mat", "the dog ran fast", "a dog sat on the mat", "a cat ran")
PLAN = Plan(
    model="bert",
    fingerprint="0123456789ab",
    device_kind="cpu",
    jax="0.11.2",
    batch_size=4,
    sizes=(2, 2),
    staggers=(0, 1),
    unroll=1,
    compiler_options={},
    decision="split",
    reason="faster",
    digest="",
    predicted=Seconds(),
    measured=Seconds(),
    max_difference=None,
    date="2026-01-01T00:00:00+00:00",
)
WAV2VEC2 = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 16000}


def make_folder(path, name, **files):
    """A Hugging Face folder of a fixture, with a tokenizer of ten words and further files."""
    path.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(DATA / name / file, path / file)
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    for file, fields in files.items():
        (path / f"{file}.json").write_text(json.dumps(fields))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT with two layers."""
    return make_folder(tmp_path_factory.mktemp("encoder") / "hf", "bert")


@pytest.fixture
def sentences(tmp_path):
    path = tmp_path / "sentences.txt"
    path.write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def timer(monkeypatch):
    return FakeTimer().install(monkeypatch)


@pytest.fixture
def unloaded(monkeypatch):
    """Fails a test in which weights are read or a factory's module is imported."""
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("it was loaded"))
    monkeypatch.setattr("pbjax.cli.source.find_source", lambda *_: pytest.fail("it was looked for"))


@pytest.fixture
def given(monkeypatch):
    """The inputs and options that the work is called with, in place of the work."""
    found = {}

    def noted(model, *inputs, **options):
        found.update(options, model=model, inputs=inputs)
        raise InputError("far enough")

    monkeypatch.setattr("pbjax.pipeline.optimize", noted)
    return found


def invoke(*arguments):
    return CliRunner().invoke(app, ["optimize", *(str(argument) for argument in arguments)])


def embed(folder, sentences, *options):
    return invoke(folder, "--texts", sentences, "--batch", 4, "--seq", 6, *options)


def check_error(result, code=2):
    """One line, after lines of progress where the job took long."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


def reached(*arguments):
    """Runs up to the work, which the fixture `given` ends."""
    result = invoke(*arguments, "--json")
    assert check_error(result).endswith("far enough"), result.stderr


# The whole job


def test_report_is_printed_and_the_plan_written(folder, sentences, timer, tmp_path):
    result = embed(
        folder, sentences, "--split", "3,1", "--save-plan", tmp_path / "plan.json", "--exhaustive"
    )
    assert result.exit_code == 0, result.output
    assert "decision: split: split=(3, 1) was given" in result.stdout
    assert "exhaustive optimum: " in result.stdout
    assert f"written: {tmp_path / 'plan.json'}\n" in result.stderr
    assert Plan.load(tmp_path / "plan.json").sizes == (3, 1)


def test_json_is_one_document_and_a_plan_brings_its_batch(folder, sentences, timer, tmp_path):
    table, plan = tmp_path / "table.json", tmp_path / "plan.json"
    options = ("--split", "4", "--profile", table, "--save-plan", plan, "--json")
    result = embed(folder, sentences, *options)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["plan"]["sizes"] == [4]
    assert document["load_weights_s"] > 0
    assert len(Profile.load(table).rows) == len(timer.stages) > 0
    timer.stages.clear()
    sentences.write_text("\n".join([*SENTENCES, *SENTENCES]))
    again = invoke(folder, "--texts", sentences, "--seq", 6, "--plan", plan, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["plan"] == document["plan"]
    assert not timer.stages


def test_a_factory_s_model_runs_with_its_inputs(timer, tmp_path, monkeypatch):
    (tmp_path / "mine_with_inputs.py").write_text(
        textwrap.dedent("""
        import jax, jax.numpy as jnp

        def make():
            weights = [0.5 * jnp.eye(8)] * 3

            def model(x):
                for weight in weights:
                    x = jax.nn.gelu(x @ weight)
                return x

            return model, (jnp.ones((6, 4, 8)),)
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = invoke("mine_with_inputs:make", "--split", "4,2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["plan"]["sizes"] == [4, 2]


MIXING = """
import jax.numpy as jnp

def model():
    x = jnp.linspace(0.0, 1.0, 12).reshape(4, 3)
    return lambda x: jnp.exp(x @ x.T), (x,)
"""


def test_a_model_that_mixes_its_batch_runs_whole_and_has_no_timetable(tmp_path, monkeypatch):
    (tmp_path / "mixing_factory.py").write_text(MIXING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = invoke("mixing_factory:model")
    assert done.exit_code == 0
    assert "the batch cannot be split: dot_general (mixing_factory.py:6)" in done.stdout
    refused = invoke("mixing_factory:model", "--trace", str(tmp_path / "trace.json"))
    assert refused.exit_code == 2
    assert "so there is no timetable" in refused.stderr
    assert not (tmp_path / "trace.json").exists()


def test_batch_auto_chooses_a_batch_and_says_why(folder, sentences, timer, monkeypatch):
    def timed(function, params, *inputs, samples):
        return Timing(median_s=1e-3 * inputs[0].shape[0] ** 0.5, spread_s=0.0, samples=samples)

    monkeypatch.setattr("pbjax.tuning.batch_size.time_function", timed)
    options = ("--batch", "auto", "--latency-ms", 1.8, "--seq", 6)
    result = invoke(folder, "--texts", sentences, *options)
    assert result.exit_code == 0, result.output
    assert re.search(r"batch 3: .*latency|batch 3: throughput: it is the best", result.stdout)
    assert ", batch 3, on cpu" in result.stdout


def test_batch_auto_within_no_time_is_refused(folder, sentences):
    options = ("--batch", "auto", "--latency-ms", 1e-6, "--seq", 6)
    result = invoke(folder, "--texts", sentences, *options, "--json")
    assert "it must keep the limit" in check_error(result)


# Inputs of the model's own kind


def test_texts_of_an_encoder_come_with_their_mask(folder, sentences, given):
    reached(folder, "--texts", sentences, "--seq", 6)
    ids, mask = given["inputs"]
    assert ids.shape == mask.shape == (4, 6)
    assert mask.sum(axis=1).tolist() == [6, 4, 6, 3]


def test_texts_of_a_decoder_are_tokens_alone(sentences, given, tmp_path):
    reached(make_folder(tmp_path / "gpt2", "gpt2"), "--texts", sentences, "--batch", 3)
    (ids,) = given["inputs"]
    # 64 tokens where the model has positions for them.
    assert ids.shape == (3, min(64, given["model"].config.max_seq_len))
    assert ids[0, :6].tolist() == [2, 3, 5, 7, 8, 9]


def test_ids_are_padded_for_an_encoder(folder, given, tmp_path):
    (tmp_path / "ids.json").write_text("[[5, 6, 7], [8]]")
    reached(folder, "--ids", tmp_path / "ids.json")
    ids, mask = given["inputs"]
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert given["split"] is None


def test_ids_of_numpy_are_rows(given, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(12).reshape(3, 4))
    reached(DATA / "llama", "--ids", tmp_path / "ids.npy", "--batch", 2)
    (ids,) = given["inputs"]
    assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_folder_of_images_is_a_batch(given, tmp_path):
    path = make_folder(tmp_path / "vit", "vit", preprocessor_config={"size": 20})
    with np.load(DATA / "preprocessing.npz") as file:
        picture = Image.fromarray(file["pixels"])
    (tmp_path / "pictures").mkdir()
    for name in ("b.png", "a.png"):
        picture.save(tmp_path / "pictures" / name)
    picture.save(tmp_path / "c.png")
    reached(path, "--images", tmp_path / "pictures", "--images", tmp_path / "c.png")
    (pixels,) = given["inputs"]
    assert pixels.shape == (3, 3, 20, 20)


def test_shorter_audio_is_silent_at_its_end(given, tmp_path):
    path = make_folder(tmp_path / "conformer", "conformer", preprocessor_config=WAV2VEC2)
    samples = np.random.default_rng(0).integers(-9000, 9000, 2400, np.int16)
    for name, count in (("a.wav", 2400), ("b.wav", 2000)):
        with wave.open(str(tmp_path / name), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(samples[:count].tobytes())
    reached(path, "--audio", tmp_path / "a.wav", "--audio", tmp_path / "b.wav")
    (values,) = given["inputs"]
    assert values.shape == (2, 2400)
    assert np.ptp(values[1, 2000:]) == 0


@pytest.mark.parametrize(
    ("name", "seq", "shape"),
    [("bert", 6, (3, 6)), ("gpt2", 6, (3, 6)), ("vit", None, (3, 3, 20, 20))],
)
def test_random_inputs_are_of_the_model_s_kind(given, name, seq, shape):
    reached(DATA / name, "--batch", 3, *(() if seq is None else ("--seq", seq)))
    (found,) = given["inputs"]
    assert found.shape == shape


def test_a_preset_has_random_weights(given):
    reached("minilm", "--batch", 2, "--seq", 8, "--dtype", "float32")
    assert given["model"].config.num_layers == 6
    assert given["inputs"][0].shape == (2, 8)


def test_shapes_become_random_values(folder, given):
    options = ("--shape", "4x6xint32", "--shape", "4x6xint32", "--split", "2,2", "--fuse", "none")
    reached(folder, *options)
    ids, _ = given["inputs"]
    assert ids.dtype == np.int32
    assert 2 < ids.max() < given["model"].config.vocab_size
    assert given["split"] == (2, 2)


# Refusals: what arguments decide comes before all else


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--split", ""), "--split : not numbers"),
        (("--split", "a,b"), "--split a,b: not numbers"),
        (("--split", "2,2,"), "--split 2,2,: not numbers"),
        (("--split", "1.5,2.5"), "not numbers"),
        (("--batch", 4, "--split", "2,1"), "adds up to 3; the batch has 4 rows"),
        (("--batch", 4, "--split", "4,0"), ""),
        (("--split", "1,1,1,1"), ""),
        (("--split", "6,-2"), ""),
        (("--batch", "auto", "--split", "2,1"), "sizes decide the batch"),
        (("--batch", 0), "--batch 0: not a number of rows"),
        (("--batch", "many"), "--batch many: not a number of rows"),
        (("--latency-ms", 5), "no batch is chosen"),
        (("--batch", 4, "--latency-ms", 5), "the batch is given already"),
        (("--batch", "auto", "--latency-ms", 0), "not a time"),
        (("--fuse", "xyz"), "no pattern 'xyz'"),
        (("--fuse", "all,gemm"), "all beside other names"),
        (("--texts", "a", "--shape", "4x6"), "--texts --shape: inputs of several kinds"),
        (("--images", "a", "--audio", "b"), "--images --audio: inputs of several kinds"),
        (("--shape", "4x6", "--seq", 6), "--seq 6 --shape: "),
        (("--shape", "x"), "--shape x: not sizes and a dtype"),
        (("--shape", "0x4"), "--shape 0x4: not sizes"),
        (("--shape", "4x6xint64"), "--shape 4x6xint64: not sizes"),
        (("--shape", "4x6", "--shape", "5x6"), "their first sizes differ"),
        (("--batch", 1, "--html", "a.html"), "--html a.html: a loaded plan, and a batch of one"),
    ],
)
def test_what_arguments_decide_is_refused_before_the_model_is_looked_for(unloaded, options, words):
    line = check_error(invoke("bert-base", *options))
    assert words in line
    assert line.count(";") >= 2


def test_what_a_plan_decides_is_refused_before_the_model_is_looked_for(unloaded, tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    for options, words in {
        ("--split", "3,1"): "both say what to run; one of them is allowed",
        ("--batch", 5): "--batch 5: the plan is for 4 rows",
        ("--batch", "auto"): "--batch auto: the plan is for 4 rows",
        ("--exhaustive",): "--exhaustive --plan: a loaded plan comes without",
        ("--trace", tmp_path / "t.json"): "t.json: a loaded plan",
    }.items():
        line = check_error(invoke("bert-base", "--plan", path, *options))
        assert words in line
        assert line.count(";") >= 2


@pytest.mark.parametrize("option", ["--plan", "--profile"])
def test_a_corrupt_file_is_refused_before_the_model_is_looked_for(unloaded, tmp_path, option):
    path = tmp_path / "file.json"
    path.write_text('{"schema_version": 1, "rows"')
    check_error(invoke("bert-base", option, path))
    assert path.read_text() == '{"schema_version": 1, "rows"'


@pytest.mark.parametrize("option", ["save-plan", "trace", "html", "profile", "figures"])
@pytest.mark.parametrize("place", ["file/in a file", "folder"])
def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_looked_for(
    unloaded, tmp_path, option, place
):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    path = tmp_path / place
    if (option, place) == ("figures", "folder"):
        return  # The one that may be a folder.
    line = check_error(invoke("bert-base", f"--{option}", path))
    assert str(path) in line
    assert line.count(";") >= 1


# Refusals: what files and configurations decide comes before the weights


@pytest.fixture
def weightless(monkeypatch):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("it was loaded"))


@pytest.mark.parametrize(
    ("name", "option", "words"),
    [
        ("bert", "--images", "BertModel takes texts; --texts and --ids and --shape are allowed"),
        ("gpt2", "--audio", "GPT2Model takes texts; --texts and --ids and --shape are allowed"),
        ("vit", "--texts", "ViTModel takes images; --images and --shape are allowed"),
        ("conformer", "--ids", "Wav2Vec2ConformerModel takes audio; --audio and --shape are"),
    ],
)
def test_inputs_of_another_kind_are_refused_with_what_the_model_takes(
    weightless, name, option, words
):
    line = check_error(invoke(DATA / name, option, "file"))
    assert words in line
    assert line.count(";") >= 2


def test_a_preset_has_no_tokenizer(weightless, sentences):
    line = check_error(invoke("bert-base", "--texts", sentences))
    assert "BertModel takes texts, and a preset has no files to prepare them; --ids and" in line


def test_too_few_rows_are_refused(weightless, folder, sentences, tmp_path):
    line = check_error(invoke(folder, "--texts", sentences, "--batch", 5, "--seq", 6))
    assert "--batch 5: --texts gives 4 rows; 1 to 4 are allowed" in line
    line = check_error(invoke(folder, "--shape", "4x6xint32", "--batch", 5))
    assert "--batch 5: the inputs have 4 rows" in line


def test_random_inputs_need_a_batch(weightless, folder):
    assert "--batch: it is absent" in check_error(invoke(folder, "--seq", 6))


@pytest.mark.parametrize("option", ["--texts", "--ids"])
def test_a_length_beyond_the_model_s_positions_is_refused(weightless, folder, sentences, option):
    line = check_error(invoke(folder, option, sentences, "--seq", 100_000))
    assert re.search(r"--seq 100000: the model has \d+ positions; 1 to \d+ are allowed", line)


def test_shapes_that_the_model_cannot_take_are_refused(weightless, folder):
    line = check_error(invoke(folder, "--shape", "4x100000xint32"))
    assert re.search(r"length is 100000; 1 to \d+ is possible", line)
    line = check_error(invoke(folder, *["--shape", "4x6xint32"] * 5))
    assert "it does not take these 5 inputs" in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "Expecting value"),
        ("[]", "not a list of rows"),
        ("[1, 2]", "not a list of rows"),
        ("[[1, true]]", "row 0 has True, which is no token of 97"),
        ("[[1], [97]]", "row 1 has 97, which is no token of 97"),
        ("[[-1]]", "row 0 has -1"),
    ],
)
def test_ids_that_are_none_are_refused(weightless, folder, tmp_path, text, words):
    (tmp_path / "ids.json").write_text(text)
    line = check_error(invoke(folder, "--ids", tmp_path / "ids.json"))
    assert words in line
    assert line.count(";") >= 2


def test_missing_files_are_refused(weightless, folder, sentences, tmp_path):
    none = tmp_path / "none"
    for option in ("--texts", "--ids"):
        assert str(none) in check_error(invoke(folder, option, none))
    assert str(none) in check_error(invoke(none, "--texts", sentences))
    assert "UTF-8" in check_error(invoke(folder, "--texts", DATA / "bert" / "model.safetensors"))


def test_tensors_that_do_not_fit_have_their_own_code(folder, sentences, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 65}))
    result = embed(broken, sentences, "--json")
    assert result.exit_code == 4
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "intermediate_size 65" in result.stderr


def test_unsupported_configuration_has_its_own_code(folder, sentences, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    check_error(embed(broken, sentences, "--json"), 3)


# Factories


def test_a_factory_that_is_not_there_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mine_of_tests.py").write_text(
        "value = 3\n\ndef three():\n    return 1, 2, 3\n\ndef alone():\n    return abs\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, options, words in (
        ("no_module_of_this_name:make", (), "no module 'no_module_of_this_name'"),
        ("mine_of_tests:make", (), "make is nothing in mine_of_tests"),
        ("mine_of_tests:value", (), "value is a int"),
        ("mine_of_tests:three", (), "a tuple of 3"),
        ("mine_of_tests:alone", (), "no inputs; --ids and --shape are allowed"),
        ("mine_of_tests:alone", ("--texts", "a"), "--ids and --shape are allowed"),
        ("mine_of_tests:alone", ("--dtype", "float32"), "leave out --dtype"),
    ):
        line = check_error(invoke(name, *options, "--json"))
        assert words in line
        assert line.count(";") >= 2


# How it ends


def test_failed_check_has_its_own_code(folder, sentences, monkeypatch, tmp_path):
    def wrong(*_, **__):
        raise VerificationError("optimize: output 0 differs; nothing is allowed; report it")

    monkeypatch.setattr("pbjax.pipeline.optimize", wrong)
    result = embed(folder, sentences, "--json", "--save-plan", tmp_path / "plan.json")
    assert "output 0 differs" in check_error(result, 5)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("profile", [True, False])
def test_interrupted_work_says_what_is_kept(folder, sentences, monkeypatch, tmp_path, profile):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("pbjax.pipeline.optimize", interrupt)
    options = ("--profile", tmp_path / "profile.json") if profile else ()
    result = embed(folder, sentences, *options)
    kept = "; what --profile has measured is kept" if profile else ""
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (130, f"interrupted{kept}")


@pytest.mark.filterwarnings("default::pbjax.errors.PbjaxWarning")
def test_a_warning_is_one_line(folder, sentences, given):
    sentences.write_text("a cat sat on the mat and on the hat\n" * 4)
    result = embed(folder, sentences)
    warned = next(line for line in result.stderr.splitlines() if line.startswith("warning: "))
    assert re.fullmatch(r"warning: optimize\(--texts\): 4 of 4 texts .*6 tokens.*--seq.*", warned)


def test_error_that_is_not_ours_is_not_hidden(folder, sentences, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("pbjax.pipeline.optimize", broken)
    result = embed(folder, sentences, "--json")
    assert isinstance(result.exception, RuntimeError)


def test_the_option_of_the_batch_is_a_number_or_auto():
    assert read_batch("96", None) == 96
    assert read_batch("auto", 50.0) is None
    assert read_batch(None, None) is None
