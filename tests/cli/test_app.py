"""The command line from end to end on a tiny encoder: text, JSON, exit codes, files."""

import inspect
import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from typer.main import get_command
from typer.testing import CliRunner

import models
from pbjax.cli.app import app
from pbjax.errors import FileError, InputError, PbjaxWarning, VerificationError
from pbjax.inference import texts
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile, Timing
from tests.fakes import FakeTimer

DATA = Path(__file__).parents[1] / "data" / "bert"
WORDS = ("the", "cat", "dog", "sat", "ran", "on", "a", "mat", "tree", "fast")
SENTENCES = ("The cat sat on a mat", "the dog ran fast", "a dog sat on the mat", "a cat ran")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder of a BERT with two layers, with a tokenizer of ten words."""
    path = tmp_path_factory.mktemp("encoder") / "hf"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(DATA / name, path / name)
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def sentences(tmp_path):
    path = tmp_path / "sentences.txt"
    path.write_text("\n\n".join(SENTENCES) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def timer(monkeypatch):
    return FakeTimer().install(monkeypatch)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def embed(folder, sentences, *options):
    return invoke("optimize", folder, "--texts", sentences, "--batch", 4, "--seq", 6, *options)


def check_error(result, code):
    """One line, after lines of progress where the job took long."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


def test_optimize_prints_report_and_similar_sentences(folder, sentences, timer, tmp_path):
    result = embed(
        folder, sentences, "--split", "3,1", "--save-plan", tmp_path / "plan.json", "--exhaustive"
    )
    assert result.exit_code == 0, result.output
    assert "decision: split: split=(3, 1) was given" in result.stdout
    assert "exhaustive optimum: " in result.stdout
    assert "the three most similar of 4 sentences:" in result.stdout
    assert result.stdout.endswith(f"plan written to {tmp_path / 'plan.json'}\n")
    assert Plan.load(tmp_path / "plan.json").sizes == (3, 1)


def test_optimize_json_is_one_document(folder, sentences, timer, tmp_path):
    table, plan = tmp_path / "table.json", tmp_path / "plan.json"
    options = ("--split", "4", "--profile", table, "--save-plan", plan, "--json")
    result = embed(folder, sentences, *options)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["plan"]["sizes"] == [4]
    assert len(document["similar"]) == 3
    assert {pair["first"] for pair in document["similar"]} <= set(SENTENCES)
    assert len(Profile.load(table).rows) == len(timer.stages) > 0
    timer.stages.clear()
    again = embed(folder, sentences, "--plan", plan, "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["plan"] == document["plan"]
    assert json.loads(again.stdout)["similar"] == document["similar"]
    assert not timer.stages


def test_batch_auto_chooses_a_batch_and_says_why(folder, sentences, timer, monkeypatch):
    def timed(function, params, *inputs, samples):
        return Timing(median_s=1e-3 * inputs[0].shape[0] ** 0.5, spread_s=0.0, samples=samples)

    monkeypatch.setattr("pbjax.tuning.batch_size.time_function", timed)
    options = ("--batch", "auto", "--latency-ms", 1.8, "--seq", 6, "--split", 3)
    result = invoke("optimize", folder, "--texts", sentences, *options)
    assert result.exit_code == 0, result.output
    assert re.search(r"batch 3: .*latency|batch 3: throughput: it is the best", result.stdout)
    assert "the three most similar of 3 sentences:" in result.stdout


def test_batch_auto_within_no_time_is_refused(folder, sentences, timer):
    options = ("--batch", "auto", "--latency-ms", 1e-6, "--seq", 6)
    result = invoke("optimize", folder, "--texts", sentences, *options, "--json")
    assert "it must keep the limit" in check_error(result, 2)


@pytest.mark.parametrize("split", ["", "a,b", "2;2", "2,2,", "1.5,2.5"])
def test_split_that_is_no_numbers_is_refused(folder, sentences, split):
    assert f"--split {split}" in check_error(embed(folder, sentences, "--split", split), 2)


@pytest.mark.parametrize("split", ["2,1", "5", "4,0", "1,1,1,1", "6,-2"])
def test_split_that_is_none_of_the_batch_is_refused(folder, sentences, monkeypatch, split):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("it was loaded"))
    check_error(embed(folder, sentences, "--json", "--split", split), 2)


def test_too_few_sentences_are_refused(folder, sentences):
    result = invoke("optimize", folder, "--texts", sentences, "--batch", 5, "--seq", 6)
    assert "4 sentences; 5 are needed" in check_error(result, 2)


def test_a_decoder_is_refused_before_its_weights_are_read(sentences, folder, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        source = folder if name == "tokenizer.json" else DATA.parent / "gpt2"
        shutil.copyfile(source / name, tmp_path / name)
    line = check_error(embed(tmp_path, sentences), 2)
    assert f"optimize({tmp_path}): a GPT2Model; a text encoder, such as a BERT, is allowed" in line


def test_a_length_beyond_the_model_s_positions_is_refused(folder, sentences):
    options = ("--texts", sentences, "--batch", 4, "--seq", 100_000)
    line = check_error(invoke("optimize", folder, *options), 2)
    assert re.search(r"--seq 100000: the model has \d+ positions; 1 to \d+ are allowed", line)


def test_missing_texts_are_refused(folder, tmp_path):
    check_error(embed(folder, tmp_path / "none.txt"), 2)


def test_missing_model_is_refused(sentences, tmp_path):
    assert str(tmp_path / "none") in check_error(embed(tmp_path / "none", sentences), 2)


def test_texts_that_are_no_text_are_refused(folder):
    check_error(embed(folder, DATA / "model.safetensors"), 2)


@pytest.mark.parametrize("option", ["--plan", "--profile"])
def test_corrupt_file_is_refused_before_the_model_is_loaded_and_left_alone(
    folder, sentences, monkeypatch, tmp_path, option
):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("it was loaded"))
    path = tmp_path / "file.json"
    path.write_text('{"schema_version": 1, "rows"')
    check_error(embed(folder, sentences, "--json", option, path), 2)
    assert path.read_text() == '{"schema_version": 1, "rows"'


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


def test_convert_writes_what_loads(folder, tmp_path):
    result = invoke("convert", folder, tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)
    found = models.load(tmp_path / "out")(jnp.ones((1, 4), jnp.int32)).last_hidden_state
    expected = models.load(folder)(jnp.ones((1, 4), jnp.int32)).last_hidden_state
    np.testing.assert_array_equal(found, expected)


def test_convert_prints_text(folder, tmp_path):
    result = invoke("convert", folder, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_convert_of_a_broken_folder_leaves_nothing(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    result = invoke("convert", broken, tmp_path / "out", "--json")
    assert result.exit_code in (2, 4)
    check_error(result, result.exit_code)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_convert_does_not_overwrite(folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    check_error(invoke("convert", folder, tmp_path / "out", "--json"), 2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


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
def test_a_warning_is_one_line(folder, sentences, monkeypatch):
    def refuse(*_, **__):
        raise InputError("far enough")

    monkeypatch.setattr("pbjax.pipeline.optimize", refuse)
    sentences.write_text("a cat sat on the mat and on the hat\n" * 4)
    result = embed(folder, sentences)
    warned, error = result.stderr.splitlines()[-2:]
    assert re.fullmatch(r"warning: optimize\(--texts\): 4 of 4 texts .*6 tokens.*--seq.*", warned)
    assert error == "error: far enough"


def test_error_that_is_not_ours_is_not_hidden(folder, sentences, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("pbjax.pipeline.optimize", broken)
    result = embed(folder, sentences, "--json")
    assert isinstance(result.exception, RuntimeError)


@pytest.mark.parametrize("arguments", [("--help",), ("optimize", "--help"), ("convert", "--help")])
def test_help_answers(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_a_pattern_that_there_is_not_is_refused(folder, sentences):
    result = embed(folder, sentences, "--fuse", "atention", "--json")
    assert "no pattern 'atention'" in check_error(result, 2)


@pytest.mark.parametrize("arguments", [("fly",), ("optimize",), ("optimize", "x", "--batch", "0")])
def test_wrong_usage_is_refused(arguments):
    assert invoke(*arguments).exit_code == 2


def test_blank_lines_are_no_sentences(sentences):
    assert texts.read_sentences(sentences, 4) == list(SENTENCES)
    assert texts.read_sentences(sentences, 2) == list(SENTENCES[:2])


def test_latin_1_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("Grüße\n".encode("latin-1"))
    with pytest.raises(FileError, match="UTF-8"):
        texts.read_sentences(tmp_path / "a.txt", 1)


def test_sentences_are_cut_and_padded_to_one_length(folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with pytest.warns(PbjaxWarning, match="1 of 2 texts have more than 4 tokens"):
        encoded = texts.encode(tokenizer, ["a cat", "the dog sat on a mat"], 4)
    assert encoded.input_ids.tolist() == [[8, 3, 0, 0], [2, 4, 5, 7]]
    assert encoded.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_embedding_is_the_unit_mean_of_the_tokens():
    hidden = np.array([[[3.0, 0.0], [0.0, 4.0], [99.0, 99.0]]], np.float32)
    mask = np.array([[1, 1, 0]], np.int32)
    found = texts.sentence_embeddings(hidden, mask)
    np.testing.assert_allclose(found, [[0.6, 0.8]], rtol=1e-6)


def test_sentence_without_tokens_has_an_embedding_without_nan():
    hidden, mask = np.ones((1, 2, 3), np.float32), np.zeros((1, 2), np.int32)
    assert np.isfinite(texts.sentence_embeddings(hidden, mask)).all()


def test_equal_sentences_are_no_pair():
    embeddings = np.eye(3, dtype=np.float32)[[0, 0, 1]]
    pairs = texts.most_similar(["a", "a", "b"], embeddings, 5)
    assert [(pair.first, pair.second) for pair in pairs] == [("a", "b"), ("a", "b")]


@pytest.mark.parametrize("option", ["save-plan", "trace", "figures", "html", "profile"])
def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    folder, sentences, monkeypatch, option
):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("it was loaded"))
    place = sentences / "in a file"
    line = check_error(embed(folder, sentences, f"--{option}", place), 2)
    assert f"--{option} {place}: " in line
    assert "can be written is allowed" in line


def path_options():
    """Every option of every command that is a path, as (command, option)."""
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        for each in get_command(app).commands[name].params:
            hint = str(inspect.signature(command.callback).parameters[each.name].annotation)
            if "pathlib" in hint and each.opts[0].startswith("--"):
                yield name, each.opts[0]


OPTIONS = list(path_options())


def test_options_that_are_paths_are_found():
    written = ("--save-plan", "--trace", "--figures", "--html")
    assert {("optimize", option) for option in written} <= set(OPTIONS)
    assert {("profile", "--out"), ("calibrate", "--out"), ("search", "--profile")} <= set(OPTIONS)


@pytest.mark.parametrize(("text", "found"), [("", "it is empty"), ("-", "- is neither standard")])
@pytest.mark.parametrize(
    "arguments",
    [
        *OPTIONS,
        *((command,) for command in ("convert", "optimize", "embed", "roofline")),
        *((command, "a model") for command in ("convert", "classify", "transcribe")),
        *((command, "--model") for command in ("profile", "search")),
        ("roofline", "gpt2", "--draft"),
    ],
    ids=" ".join,
)
def test_an_empty_text_and_a_dash_are_no_paths(arguments, text, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, text)
    assert result.exit_code == 2
    assert found in result.stderr
    assert "is allowed; give" in " ".join(result.stderr.replace("│", " ").split())
    assert not list(tmp_path.iterdir())
