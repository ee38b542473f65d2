"""The commands that run a model, from end to end on tiny ones: text, JSON, exit codes."""

import json
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers
from PIL import Image
from typer.testing import CliRunner

import models
import pbjax
from pbjax.cli import model_folder, transcribe
from pbjax.cli.app import app
from pbjax.inference import audio
from tests.decoders import DATA, load
from tests.sentence_folders import listed
from tests.sentence_folders import make as make_sentence_folder
from tests.wav_files import write_wav

WAV2VEC2 = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 16000}
MELS = {"feature_extractor_type": "ParakeetFeatureExtractor", "feature_size": 24}
PROMPT = "w3 w4 w5"


@pytest.fixture
def folder(tmp_path):
    """Makes the folder of a fixture with further files."""

    def make(name, size=97, **files):
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(DATA / name / file, path / file)
        words = {f"w{index}": index for index in range(size)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        if size:
            made.save(str(path / "tokenizer.json"))
        for file, fields in files.items():
            (path / f"{file}.json").write_text(json.dumps(fields))
        return path

    return make


@pytest.fixture(scope="module")
def samples():
    with np.load(DATA / "preprocessing.npz") as file:
        return file["samples"]


@pytest.fixture
def speech(samples, tmp_path):
    return write_wav(tmp_path / "a.wav", samples)


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "a.png"
    with np.load(DATA / "preprocessing.npz") as file:
        Image.fromarray(file["pixels"]).save(path)
    return path


def invoke(*arguments, given=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)


def done(*arguments, given=None):
    result = invoke(*arguments, given=given)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments):
    """The one line of the error."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert lines == result.stderr.splitlines()[-1:]
    return lines[0]


# generate


def test_one_prompt_is_continued(folder):
    result = done("generate", folder("llama"), "--prompt", PROMPT, "--max-new-tokens", 6)
    (expected,) = pbjax.generate(load("llama"), [[3, 4, 5]], max_new_tokens=6)
    assert result.stdout.split() == [f"w{token}" for token in expected.token_ids]
    assert "weights loaded in " in result.stderr
    assert re.search(r"6 tokens in .* s; of it making programs: trace \d\S* s", result.stderr)


def test_several_prompts_stand_with_their_texts(folder):
    path = folder("llama")
    result = done("generate", path, "--prompt", PROMPT, "--prompt", "w9", "--max-new-tokens", 2)
    lines = result.stdout.splitlines()
    assert lines[::2] == [f"--- {PROMPT}", "--- w9"]
    assert [len(line.split()) for line in lines[1::2]] == [2, 2]


def test_generate_json_is_one_document(folder):
    options = ("--temperature", 1, "--top-k", 30, "--top-p", 0.9, "--min-p", 0.01, "--seed", 3)
    options += ("--repetition-penalty", 1.2, "--max-new-tokens", 5, "--json")
    result = done("generate", folder("llama"), "--prompt", PROMPT, *options)
    document = json.loads(result.stdout)
    (expected,) = pbjax.generate(
        load("llama"),
        [[3, 4, 5]],
        max_new_tokens=5,
        temperature=1.0,
        top_k=30,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        seed=3,
    )
    (found,) = document["completions"]
    assert found["prompt"] == PROMPT
    assert tuple(found["token_ids"]) == expected.token_ids
    assert found["log_probs"] == pytest.approx(expected.log_probs)
    assert found["finish_reason"] == "length"
    assert document["num_tokens"] == 5
    assert 0 < document["time_to_first_token_s"] <= document["total_s"]
    made = document["making_programs_s"]
    assert {"trace", "lower", "compile"} <= made.keys()
    assert 0 < sum(made.values()) <= document["total_s"]


def test_text_ends_at_stop_strings_and_at_the_tokens_of_the_folder(folder):
    expected = pbjax.generate(load("llama"), [[3, 4, 5]], max_new_tokens=6)[0].token_ids
    options = ("--prompt", PROMPT, "--max-new-tokens", 6, "--json")
    result = done("generate", folder("llama"), *options, "--stop", f"w{expected[2]}")
    (found,) = json.loads(result.stdout)["completions"]
    assert found["finish_reason"] == "stop_string"
    assert found["text"].split() == [f"w{token}" for token in expected[:2]]
    path = folder("llama", generation_config={"eos_token_id": expected[1]})
    (found,) = json.loads(done("generate", path, *options).stdout)["completions"]
    assert found["finish_reason"] == "stop_token"
    assert found["token_ids"] == list(expected[:2])


def test_converted_model_generates_the_same(folder, tmp_path):
    source = folder("llama", generation_config={"eos_token_id": 56})
    models.convert(source, tmp_path / "ours")
    options = ("--prompt", PROMPT, "--max-new-tokens", 8, "--json")
    one, two = (
        json.loads(done("generate", path, *options).stdout)["completions"]
        for path in (source, tmp_path / "ours")
    )
    assert one == two


def test_messages_are_written_by_the_template_of_the_folder(folder):
    template = "{% for m in messages %}w9 {{ m.content }} {% endfor %}w7"
    path = folder("llama", tokenizer_config={"chat_template": template})
    options = ("--chat", "--system", "w8", "--prompts", "-", "--max-new-tokens", 6, "--json")
    found = json.loads(done("generate", path, *options, given=b"w3 w4\n").stdout)["completions"]
    (expected,) = pbjax.generate(load("llama"), [[9, 8, 9, 3, 4, 7]], max_new_tokens=6)
    assert tuple(found[0]["token_ids"]) == expected.token_ids
    (same,) = pbjax.generate(
        load("llama"),
        messages=[{"role": "system", "content": "w8"}, {"role": "user", "content": "w3 w4"}],
        chat_template=models.load_chat_template(path),
        tokenizer=models.load_tokenizer(path),
        max_new_tokens=6,
    )
    assert same.token_ids == expected.token_ids


def test_chat_is_refused_without_a_template(folder):
    path = folder("llama")
    assert "has no chat template" in refused("generate", path, "--chat", "--prompt", "w1")
    assert "--system 'w1'" in refused("generate", path, "--system", "w1", "--prompt", "w1")
    assert "--prompt and --prompts are both given or both absent" in refused("generate", path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", -1), "temperature=-1.0"),
        (("--top-p", 0, "--temperature", 1), "top_p=0.0"),
        (("--top-p", 0.5), "raise temperature or leave them out"),
        (("--max-new-tokens", 0), "max_new_tokens=0"),
        (("--max-new-tokens", 126), "the model has 128 positions"),
        (("--stop", ""), "non-empty texts"),
        (("--seed", -1), "-1 among them"),
    ],
)
def test_generate_refuses_in_one_line(folder, options, message):
    path = folder("llama")
    given = ("--prompt", PROMPT, "--max-new-tokens", 4, *options)
    assert message in refused("generate", path, *given)


def test_generate_needs_a_tokenizer(folder):
    assert "tokenizer.json: no such file" in refused(
        "generate", folder("llama", size=0), "--prompt", PROMPT
    )


@pytest.mark.parametrize(
    ("command", "name", "given", "found"),
    [
        ("generate", "bert", ("--prompt", PROMPT), "a BertModel; a GPT-2, BLOOM or LLaMA"),
        ("generate", "vit", ("--prompt", PROMPT), "a ViTModel; a GPT-2, BLOOM or LLaMA"),
        ("embed", "gpt2", ("--text", PROMPT), "a GPT2Model; a text encoder"),
        ("embed", "conformer", ("--text", PROMPT), "a Wav2Vec2Conformer.*; a text encoder"),
        ("classify", "llama", ("a.png",), "a LlamaModel; a ViT with a classification head"),
        ("transcribe", "vit", ("a.wav",), "a ViTModel; a model of speech with a CTC head"),
    ],
)
def test_another_model_is_refused_before_its_weights_are_read(folder, command, name, given, found):
    path = folder(name)
    (path / "model.safetensors").unlink()
    line = refused(command, path, *given)
    assert re.search(rf"{command}\(.*\): {found}.* is allowed; give the folder", line)


def test_options_are_refused_before_the_weights_are_read(folder):
    path = folder("llama")
    (path / "model.safetensors").unlink()
    options = ("--prompt", PROMPT, "--temperature", -1)
    assert "temperature=-1.0" in refused("generate", path, *options)


# embed


@pytest.fixture
def sentences(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("w1 w2 w3\nw4\nw5 w6 w7 w8\n", encoding="utf-8")
    return path


def test_texts_become_unit_vectors(folder, sentences):
    path = folder("bert")
    document = json.loads(done("embed", path, "--texts", sentences, "--json").stdout)
    found = document["embeddings"]
    assert [row["text"] for row in found] == ["w1 w2 w3", "w4", "w5 w6 w7 w8"]
    vectors = np.array([row["vector"] for row in found])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    hidden = models.load(path)(np.array([[1, 2, 3]], np.int32)).last_hidden_state[0]
    mean = np.asarray(hidden.mean(axis=0))
    np.testing.assert_allclose(vectors[0], mean / np.linalg.norm(mean), atol=1e-5)


@pytest.mark.filterwarnings("always::pbjax.errors.PbjaxWarning")
def test_rows_are_those_of_the_lines_of_a_file(folder, tmp_path):
    path, lines = folder("bert"), tmp_path / "lines.txt"
    content = "\ufeffw1 w2\n\nw3\x0cw4\x85w4\u2028w4\r\n  \nw5"
    lines.write_bytes(content.encode())
    result = done("embed", path, "--texts", lines, "--out", tmp_path / "v.npy", "--json")
    assert "2 of 5 lines are blank; they are embedded as empty texts" in result.stderr
    rows = json.loads(result.stdout)["embeddings"]
    assert [row["text"] for row in rows] == ["w1 w2", "", "w3\x0cw4\x85w4\u2028w4", "  ", "w5"]
    vectors = np.load(tmp_path / "v.npy")
    assert (vectors.shape, vectors.dtype) == ((5, 32), np.float32)
    np.testing.assert_allclose(vectors, [row["vector"] for row in rows], rtol=1e-6)
    assert (np.linalg.norm(vectors, axis=1) > 0.5).tolist() == [True, False, True, False, True]
    piped = done("embed", path, "--texts", "-", "--out", tmp_path / "w.npy", given=content.encode())
    assert piped.stdout == f"{tmp_path / 'w.npy'}: 5 vectors of 32 numbers, f32\n"
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy"), vectors)
    pairs = json.loads(done("embed", path, "--texts", lines, "--similar", 9, "--json").stdout)
    assert len(pairs["similar"]) == 3


def test_embed_follows_the_folder_and_then_its_options(tmp_path):
    prompts = {"prompts": {"query": "find : "}, "default_prompt_name": "query"}
    layers = [("Normalize", {})]
    path = make_sentence_folder(
        tmp_path / "a", pooling=listed("cls"), layers=layers, prompts=prompts
    )

    def vector(*options):
        text = done("embed", path, "--text", "a cat sat on", *options, "--json").stdout
        return np.array(json.loads(text)["embeddings"][0]["vector"])

    hidden = np.asarray(models.load(path)(np.array([[2, 9, 11, 4, 5, 6, 1, 3]])).last_hidden_state)
    first, mean = hidden[0, 0], hidden[0].mean(axis=0)
    np.testing.assert_allclose(vector(), first / np.linalg.norm(first), atol=1e-5)
    np.testing.assert_allclose(
        vector("--pooling", "mean,cls", "--no-normalize"), [*mean, *first], atol=1e-5
    )
    other = vector("--prompt", "find : a ", "--max-length", 5, "--no-normalize")
    cut = np.asarray(models.load(path)(np.array([[2, 9, 11, 4, 3]])).last_hidden_state)[0, 0]
    np.testing.assert_allclose(other, cut, atol=1e-5)
    assert "no prompt has that name" in refused("embed", path, "--text", "a", "--prompt-name", "b")


def test_control_characters_of_texts_do_not_reach_the_terminal(folder):
    line = done("embed", folder("bert"), "--text", "w1 \x1b[2J\x07\x9b\nw2").stdout
    assert line.endswith("w1 \\x1b[2J\\x07\\x9b\\nw2\n")


def test_embed_prints_a_line_a_text(folder):
    lines = done("embed", folder("bert"), "--text", "w1", "--text", "w2 w3").stdout.splitlines()
    assert [line.split("  ")[-1] for line in lines] == ["w1", "w2 w3"]
    assert all("... (32)" in line for line in lines)


def test_embed_refuses_in_one_line(folder, sentences, tmp_path):
    path = folder("bert")
    assert "--texts and --text are both given or both absent" in refused("embed", path)
    both = ("--texts", sentences, "--text", "w1")
    assert "--texts and --text are both given" in refused("embed", path, *both)
    assert "none.txt" in refused("embed", path, "--texts", tmp_path / "none.txt")
    sentences.write_text("\n\n")
    assert "no text; one or more are needed" in refused("embed", path, "--texts", sentences)


# classify


def test_classes_are_ranked_by_probability(folder, picture):
    path = folder("vit", size=0, preprocessor_config={"size": 20})
    with np.load(DATA / "preprocessing.npz") as file:
        scores = models.load(path)(file["image.bilinear"][None]).logits[0]
    expected = np.asarray(jax.nn.softmax(scores))
    lines = done("classify", path, picture).stdout.splitlines()
    order = np.argsort(-expected)
    assert [line[8:] for line in lines] == [f"label {index}" for index in order]
    assert [float(line[:6]) for line in lines] == pytest.approx(expected[order], abs=1e-4)
    document = json.loads(done("classify", path, picture, picture, "--top", 2, "--json").stdout)
    assert [image["file"] for image in document["images"]] == [str(picture)] * 2
    for image in document["images"]:
        assert [row["index"] for row in image["classes"]] == order[:2].tolist()


def test_several_images_stand_with_their_names(folder, picture):
    path = folder("vit", size=0, preprocessor_config={"size": 20})
    lines = done("classify", path, picture, picture, "--top", 1).stdout.splitlines()
    assert lines[::2] == [str(picture)] * 2


def test_classify_refuses_in_one_line(folder, picture, speech, tmp_path):
    path = folder("vit", size=0)
    assert "preprocessor_config.json: no such file" in refused("classify", path, picture)
    path = folder("vit", size=0, preprocessor_config={"size": 20})
    assert "not readable as an image" in refused("classify", path, speech)
    assert "not readable as an image" in refused("classify", path, tmp_path / "missing.png")
    path = folder("vit", size=0, preprocessor_config={"size": 24})
    assert "[batch, 3, 20, 20] is needed" in refused("classify", path, picture)
    for name in ("vit_features", "bert"):
        path = folder(name, size=0, preprocessor_config={"size": 12})
        assert "a ViT with a classification head is allowed" in refused("classify", path, picture)


# transcribe


def test_speech_becomes_text_by_characters(folder, speech):
    vocabulary = {c: index for index, c in enumerate([*"ABC", "<pad>", *"|DEFGHIJK"])}
    path = folder("conformer", size=0, preprocessor_config=WAV2VEC2, vocab=vocabulary)
    document = json.loads(done("transcribe", path, speech, "--json").stdout)
    (found,) = document["transcripts"]
    assert found["file"] == str(speech)
    assert found["seconds"] == 0.15
    assert len(found["text"]) > 3
    assert set(found["text"]) <= set("ABC DEFGHIJK")
    assert done("transcribe", path, speech).stdout == found["text"] + "\n"


def test_speech_becomes_text_by_a_spectrogram_and_a_tokenizer(folder, speech):
    path = folder("parakeet", size=13, preprocessor_config=MELS)
    with np.load(DATA / "preprocessing.npz") as file:
        mels = file["audio.mels"][None]
    mask = np.array([[1] * 15 + [0]], np.int32)
    scores = np.asarray(models.load(path)(mels, mask).logits[0, :2])
    expected = [f"w{index}" for index in scores.argmax(axis=1) if index != 12]
    assert expected
    lines = done("transcribe", path, speech, speech).stdout.splitlines()
    assert lines == [f"{speech}: {' '.join(expected)}"] * 2


def test_speech_becomes_text_by_lasr(folder, speech, samples):
    settings = {"feature_extractor_type": "LasrFeatureExtractor", "feature_size": 16}
    path = folder("lasr", size=13, preprocessor_config=settings)
    mels = audio.feature_extractor(settings, "m")(samples.astype(np.float32) / 32768)
    best = np.asarray(models.load(path)(mels).logits[0]).argmax(axis=1)
    words = [f"w{index}" for index in best if index != 0]
    assert done("transcribe", path, speech).stdout == " ".join(words) + "\n"


def test_transcribe_refuses_in_one_line(folder, speech, picture):
    path = folder("parakeet", size=13)
    assert "preprocessor_config.json: no such file" in refused("transcribe", path, speech)
    path = folder("conformer", size=0, preprocessor_config=WAV2VEC2)
    assert "has no tokenizer.json and no vocab.json" in refused("transcribe", path, speech)
    path = folder("parakeet", size=13, preprocessor_config=MELS)
    assert "not readable as audio" in refused("transcribe", path, picture)
    whisper = {"feature_extractor_type": "WhisperFeatureExtractor"}
    path = folder("parakeet", size=13, preprocessor_config=whisper)
    assert "type is 'WhisperFeatureExtractor'" in refused("transcribe", path, speech)
    path = folder("bert", preprocessor_config=WAV2VEC2)
    assert "a BertModel; a model of speech with a CTC head is allowed" in refused(
        "transcribe", path, speech
    )


def test_bad_file_does_not_lose_the_others(folder, speech, picture, tmp_path):
    path, short = folder("parakeet", size=13, preprocessor_config=MELS), tmp_path / "short.wav"
    write_wav(short, np.zeros(100, np.int16))
    good = done("transcribe", path, speech).stdout.strip()
    files = (picture, speech, short, tmp_path / "none.wav", speech)
    result = invoke("transcribe", path, *files)
    assert result.exit_code == 2
    assert result.stdout.splitlines() == [f"{speech}: {good}"] * 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for line, file, said in zip(
        errors,
        (picture, short, tmp_path / "none.wav"),
        ("not readable as audio", "100 samples make 0 frames", "No such file"),
        strict=True,
    ):
        assert line.startswith(f"error: {file}: ")
        assert said in line
    document = json.loads(invoke("transcribe", path, *files, "--json").stdout)
    assert [row["file"] for row in document["transcripts"]] == [str(speech)] * 2
    assert [row["file"] for row in document["failed"]] == [str(files[i]) for i in (0, 2, 3)]


def test_audio_too_long_for_the_memory_does_not_lose_the_others(folder, speech, monkeypatch):
    path = folder("parakeet", size=13, preprocessor_config=MELS)
    run = model_folder.run

    def fails_once(*arguments):
        monkeypatch.setattr(transcribe, "run", run)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    monkeypatch.setattr(transcribe, "run", fails_once)
    result = invoke("transcribe", path, speech, speech)
    assert (result.exit_code, len(result.stdout.splitlines())) == (2, 1)
    assert f"error: {speech}: 0 s of audio need more memory than there is" in result.stderr


def test_bad_image_does_not_lose_the_others(folder, speech, picture):
    path = folder("vit", size=0, preprocessor_config={"size": 20})
    (good,) = json.loads(done("classify", path, picture, "--json").stdout)["images"]
    result = invoke("classify", path, speech, picture, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["images"] == [good]
    assert f"error: {speech}: not readable as an image" in result.stderr


@pytest.mark.parametrize(
    ("command", "preset", "more"),
    [
        ("generate", "gpt2", ("--prompt", "a")),
        ("embed", "minilm", ("--text", "a")),
        ("classify", "vit-base", (__file__,)),
        ("transcribe", "parakeet-ctc-0.6b", (__file__,)),
        ("convert", "bert-base", ("new",)),
    ],
)
def test_preset_where_a_folder_is_needed_is_called_one(command, preset, more):
    line = refused(command, preset, *more)
    assert line.startswith(
        f"error: {preset}: the name of a preset, which has sizes and no weights;"
    )
    assert "presets are" not in line


def test_platform_without_its_plugin_is_one_line(speech, monkeypatch):
    def fails(*_, **__):
        raise AssertionError

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr("pbjax.device.find_spec", lambda name: None)
    monkeypatch.setattr(transcribe, "find_folder", fails)
    result = invoke("transcribe", "m", speech)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert (
        'JAX has no CUDA plugin; an installed platform is allowed; pip install "pbjax[cuda]"'
        in (result.stderr)
    )


def test_platform_that_jax_cannot_start_is_one_line(speech, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("Unable to initialize backend 'foo': it is\nunknown.")

    monkeypatch.setattr(transcribe, "find_folder", fails)
    result = invoke("transcribe", "m", speech)
    assert result.exit_code == 1
    assert result.stderr == "error: Unable to initialize backend 'foo': it is unknown.\n"


@pytest.mark.parametrize("command", ["generate", "embed", "classify", "transcribe"])
def test_help_answers_without_jax(command):
    code = (
        "import sys, typer.testing, pbjax.cli.app; "
        f"r = typer.testing.CliRunner().invoke(pbjax.cli.app.app, ['{command}', '--help']); "
        "assert r.exit_code == 0 and 'Usage' in r.stdout; "
        "assert not {'jax', 'flax', 'models', 'numpy', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
