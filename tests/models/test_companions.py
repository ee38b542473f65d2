"""The small files beside the weights, in a Hugging Face folder and in one of convert."""

import json

import pytest
import tokenizers

import models
from models.companions import check_companions
from tests.decoders import make
from tests.sentence_folders import listed
from tests.sentence_folders import make as make_sentence_folder

FILES = {
    "generation_config.json": {"eos_token_id": [7, 9]},
    "preprocessor_config.json": {"size": 20},
    "vocab.json": {"<pad>": 0, "|": 1, "A": 2, "B": 3},
    "tokenizer_config.json": {"word_delimiter_token": "|", "do_lower_case": True},
}


@pytest.fixture(params=["hugging face", "converted"])
def folder(request, tmp_path):
    """A folder with all the files, as it came or as convert wrote it."""
    path = make(tmp_path / "hf", "gpt2", id2label={"0": "cat", "1": "dog"})
    for name, fields in FILES.items():
        (path / name).write_text(json.dumps(fields))
    if request.param == "hugging face":
        return path
    models.convert(path, tmp_path / "ours")
    return tmp_path / "ours"


def write(path, name, fields):
    path.mkdir(exist_ok=True)
    (path / name).write_text(json.dumps(fields))
    return path


def test_stop_tokens_labels_and_settings_are_read(folder):
    assert models.load_stop_tokens(folder) == (7, 9)
    assert models.load_labels(folder) == ("cat", "dog")
    assert models.load_preprocessor(folder) == {"size": 20}
    assert models.load_vocabulary(folder).decode([2, 1, 3, 2]) == "a ba"


def test_stop_token_of_the_configuration_counts_where_no_other_is(folder):
    (folder / "generation_config.json").unlink()
    assert models.load_stop_tokens(folder) == (96,)
    write(folder, "generation_config.json", {"eos_token_id": None})
    assert models.load_stop_tokens(folder) == (96,)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"model_type": "gpt2"}, (50256,)),
        ({"model_type": "llama"}, (2,)),
        ({"model_type": "bloom"}, (2,)),
        ({"model_type": "bert"}, ()),
        ({"model_type": "llama", "eos_token_id": None}, ()),
    ],
)
def test_absent_stop_token_has_the_default_of_transformers(tmp_path, fields, tokens):
    write(tmp_path, "config.json", fields)
    assert models.load_stop_tokens(tmp_path) == tokens


@pytest.mark.parametrize("value", ["96", [1, None], 1.5, True, [[1]]])
def test_stop_token_that_is_none_is_refused(tmp_path, value):
    write(tmp_path, "config.json", {"eos_token_id": value})
    with pytest.raises(models.CheckpointError, match="eos_token_id is"):
        models.load_stop_tokens(tmp_path)


def test_nothing_said_is_nothing(tmp_path):
    write(tmp_path, "config.json", {})
    assert models.load_stop_tokens(tmp_path) == ()
    assert models.load_labels(tmp_path) == ()


@pytest.mark.parametrize("value", [["cat"], {"0": "cat", "2": "dog"}, {"a": "cat"}])
def test_labels_without_their_numbers_are_refused(tmp_path, value):
    write(tmp_path, "config.json", {"id2label": value})
    with pytest.raises(models.CheckpointError, match="id2label does not name each of 0, 1"):
        models.load_labels(tmp_path)


def test_settings_of_transformers_5_lie_in_a_section(tmp_path):
    write(tmp_path, "processor_config.json", {"feature_extractor": {"n_fft": 512}, "x": 1})
    assert models.load_preprocessor(tmp_path) == {"n_fft": 512}


def test_missing_settings_are_refused(tmp_path):
    with pytest.raises(models.CheckpointError, match=r"preprocessor_config.json: no such file"):
        models.load_preprocessor(tmp_path)


def test_tokenizer_comes_before_characters(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"yes": 0, "no": 1}, unk_token="no"))
    made.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "vocab.json", FILES["vocab.json"])
    assert models.load_vocabulary(tmp_path).decode([1, 0]) == "no yes"


def test_missing_and_malformed_vocabularies_are_refused(tmp_path):
    with pytest.raises(models.CheckpointError, match=r"has no tokenizer.json and no vocab.json"):
        models.load_vocabulary(tmp_path)
    write(tmp_path, "vocab.json", {"A": "0"})
    with pytest.raises(models.CheckpointError, match="some texts have no number"):
        models.load_vocabulary(tmp_path)


# What convert says of them


def converted(path):
    lines = []
    models.convert(path, path.parent / "ours", report=lines.append)
    return [line for line in lines if line.startswith("warning")]


def test_absent_tokenizer_is_a_warning_of_convert(tmp_path):
    (line,) = converted(make(tmp_path / "hf", "gpt2"))
    assert "tokenizer.json: no such file; pbjax generate and --texts need it" in line


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_broken_file_is_an_error_of_convert_before_the_weights_are_read(tmp_path, name):
    path = make(tmp_path / "hf", "gpt2")
    (path / name).write_text('{"version": "1.0", ')
    with pytest.raises(models.CheckpointError, match=f"{name}: not readable"):
        models.convert(path, tmp_path / "ours")
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("model_type", "files", "number"),
    [
        ("bert", (), 1),
        ("llama", (), 1),
        ("parakeet_ctc", (), 1),
        ("parakeet_ctc", ("vocab.json",), 0),
        ("lasr_encoder", (), 0),
        ("vit", (), 0),
    ],
)
def test_what_is_needed_depends_on_the_family(tmp_path, model_type, files, number):
    for name in files:
        write(tmp_path, name, {"a": 0})
    assert len(check_companions(tmp_path, model_type)) == number


def test_module_that_embed_refuses_is_a_warning_of_convert(tmp_path):
    path = make_sentence_folder(tmp_path / "a", pooling=listed("cls"), layers=[("LSTM", {})])
    (line,) = check_companions(path, "bert")
    assert "pbjax embed will refuse the folder: " in line
    assert "module LSTM is not supported" in line
