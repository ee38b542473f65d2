"""Folders of sentence-transformers: their vectors, and what of them is refused by name."""

import re
from functools import cache

import numpy as np
import pytest

import models
from pbjax.errors import InputError, PbjaxWarning
from pbjax.inference.embedding import embed
from tests.sentence_folders import (
    CASES,
    DATA,
    DENSE,
    MODES,
    PROMPTS,
    REFERENCE,
    TEXTS,
    legacy,
    listed,
    make,
    tokenizer,
    write,
)

CLOSE = {"rtol": 0, "atol": 1e-5}


@cache
def bert():
    return models.load(DATA / "bert")


@pytest.fixture(scope="module")
def reference():
    with np.load(REFERENCE) as file:
        return dict(file)


def embedded(path, texts=TEXTS, **asked):
    settings = models.load_sentence_settings(path)
    return embed(bert(), list(texts), tokenizer=tokenizer(), settings=settings, **asked)


@pytest.mark.filterwarnings("ignore::pbjax.errors.PbjaxWarning")
@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_sentence_transformers(name, tmp_path, reference):
    contents, asked = CASES[name]
    found = embedded(make(tmp_path / "a", **contents), **asked)
    assert found.shape == reference[name].shape
    np.testing.assert_allclose(found, reference[name], **CLOSE)


@pytest.mark.parametrize(
    ("fields", "modes"),
    [
        *((legacy(mode), (mode,)) for mode in MODES),
        (legacy("lasttoken", "mean", "cls"), ("cls", "mean", "lasttoken")),
        (legacy(), ("mean",)),
        (listed("weightedmean", "cls"), ("weightedmean", "cls")),
        ({"pooling_mode": "max"}, ("max",)),
    ],
)
def test_modes_of_old_and_new_files_are_read(tmp_path, fields, modes):
    assert models.load_sentence_settings(make(tmp_path / "a", pooling=fields)).pooling == modes


def test_names_of_modules_in_newer_files_are_known(tmp_path):
    path = make(tmp_path / "a", pooling=listed("cls"), layers=[("Normalize", {})])
    text = (path / "modules.json").read_text()
    for kind, place in (
        ("Transformer", "base.modules.transformer"),
        ("Pooling", "sentence_transformer.modules.pooling"),
        ("Normalize", "base.modules.normalize"),
    ):
        text = text.replace(f"models.{kind}", f"{place}.{kind}")
    (path / "modules.json").write_text(text)
    settings = models.load_sentence_settings(path)
    assert (settings.pooling, settings.layers[0].name) == (("cls",), "Normalize")


def test_arguments_come_before_the_settings(tmp_path, reference):
    contents, _ = CASES["dense"]
    plain = reference["silent"]
    found = embedded(make(tmp_path / "a", pooling=legacy("cls")), pooling="mean", max_tokens=16)
    np.testing.assert_allclose(found, plain, **CLOSE)
    found = embedded(tmp_path / "a", pooling="mean", normalize=True)
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(found, plain / lengths, **CLOSE)
    path = make(tmp_path / "b", **contents)
    long = np.linalg.norm(embedded(path, normalize=False), axis=1)
    assert (np.abs(long - 1) > 1e-3).all()
    with pytest.raises(InputError, match="vectors of 192 values; the settings' Dense takes 32"):
        embedded(path, pooling=MODES)


def test_cut_by_the_folder_is_a_warning_unless_it_is_asked_for(tmp_path):
    path = make(tmp_path / "a", pooling=legacy("mean"), encoder={"max_seq_length": 6})
    with pytest.warns(PbjaxWarning, match="1 of 5 texts have more than 6 tokens.*folder allows"):
        embedded(path)
    embedded(path, max_tokens=6)


def test_silent_folder_gives_means_of_length_one(tmp_path, reference):
    write(tmp_path / "a" / "config.json", {})
    found = embedded(tmp_path / "a")
    plain = reference["silent"]
    expected = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt_name": "title"}, "no prompt has that name.*query, document, passage"),
        ({"prompt_name": "query", "prompt": "a"}, "two prompts; one is allowed"),
        ({"pooling": "first"}, "pooling='first'.*cls, max, mean,"),
        ({"pooling": ()}, "unknown; cls, max"),
    ],
)
def test_wrong_argument_is_refused(tmp_path, asked, message):
    path = make(tmp_path / "a", pooling=legacy("mean"), prompts=PROMPTS)
    with pytest.raises(InputError, match=message):
        embedded(path, **asked)


WEIGHTED = [("WeightedLayerPooling", {"word_embedding_dimension": 32})]
TOKENS = {**DENSE, "module_input_name": "token_embeddings"}
LEAKY = {**DENSE, "activation_function": "torch.nn.modules.activation.LeakyReLU"}
AFTER = "module .* is not supported; after Transformer and Pooling these are: Dense, Dropout"


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"layers": WEIGHTED}, AFTER.replace(".*", "WeightedLayerPooling", 1)),
        ({"prefix": "custom_st."}, "the first modules are custom_st.Transformer, custom_st.Pool"),
        ({"pooling": listed("attention")}, r"pooling_mode is \['attention'\]; cls, max"),
        ({"pooling": {"pooling_mode_attention": True}}, "pooling_mode_attention is not known"),
        ({"layers": [("Dense", TOKENS)]}, "module_input_name is 'token_embeddings'"),
        ({"layers": [("Dense", LEAKY)]}, "activation_function is torch.*LeakyReLU; GELU, ReLU"),
        ({"encoder": {"query_expansion": {"a": 1}}}, "query_expansion is {'a': 1}"),
        ({"encoder": {"max_seq_length": "128"}}, "the longest text has '128' tokens"),
        ({"prompts": {"model_type": "SparseEncoder"}}, "a SparseEncoder; a SentenceTransformer"),
        ({"prompts": {"default_prompt_name": "title"}}, "default_prompt_name is 'title'"),
        ({"prompts": {"prompts": ["a"]}}, r"prompts is \['a'\]; a text for each name"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, contents, message):
    path = make(tmp_path / "a", **({"pooling": legacy("mean")} | contents))
    with pytest.raises(models.ConfigError, match=message):
        models.load_sentence_settings(path)


def test_tensors_of_another_shape_are_refused(tmp_path):
    path = make(tmp_path / "a", pooling=legacy("mean"), layers=[("Dense", DENSE)])
    write(path / "2_Dense" / "config.json", {**DENSE, "out_features": 9})
    with pytest.raises(models.KeyMismatchError, match=r"\(8, 32\).*\(9, 32\).* are needed"):
        models.load_sentence_settings(path)


def test_transformer_in_a_folder_of_its_own_is_refused(tmp_path):
    path = make(tmp_path / "a", pooling=legacy("mean"))
    modules = (path / "modules.json").read_text()
    (path / "modules.json").write_text(modules.replace('"path": ""', '"path": "0_Transformer"'))
    with pytest.raises(models.ConfigError, match="lies in 0_Transformer; one in the folder itself"):
        models.load_sentence_settings(path)
    (path / "modules.json").write_text(re.sub('"path": "1_Pooling"', '"path": "../b"', modules))
    with pytest.raises(models.ConfigError, match=r"a module lies in '\.\./b'"):
        models.load_sentence_settings(path)


def test_converted_folder_gives_the_same_vectors(tmp_path):
    contents, _ = CASES["dense"]
    path = make(tmp_path / "a", prompts=PROMPTS, encoder={"max_seq_length": 12}, **contents)
    models.convert(path, tmp_path / "ours", report=lambda line: None)
    one, two = (models.load_sentence_settings(folder) for folder in (path, tmp_path / "ours"))
    vectors = np.random.default_rng(3).normal(size=(2, 32)).astype(np.float32)
    for first, second in zip(one.layers, two.layers, strict=True):
        np.testing.assert_array_equal(first.apply(vectors), second.apply(vectors))
        vectors = first.apply(vectors)
    for name in ("pooling", "max_tokens", "lower_case", "prompts", "default_prompt"):
        assert getattr(one, name) == getattr(two, name)
