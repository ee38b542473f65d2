"""Texts checked, read, cut and padded, and made into embeddings that are compared."""

import numpy as np
import pytest
import tokenizers

from pbjax.errors import FileError, InputError, PbjaxWarning
from pbjax.inference import texts
from pbjax.inference.texts import check_unicode

WORDS = ("the", "cat", "dog", "sat", "ran", "on", "a", "mat", "tree", "fast")
SENTENCES = ("The cat sat on a mat", "the dog ran fast", "a dog sat on the mat", "a cat ran")


def test_texts_of_any_script_are_allowed():
    check_unicode("embed(texts)", ["", "harbour", "Rußland", "港", "\U0001f30a"])


@pytest.mark.parametrize("text", ["\udcff", "a\ud83d", "\udf0a b"])
def test_half_of_a_surrogate_pair_is_refused_by_its_number(text):
    with pytest.raises(InputError, match=r"embed\(texts\): text 1 is '.*\\ud.*no Unicode"):
        check_unicode("embed(texts)", ["good", text])


def test_blank_lines_are_no_sentences(tmp_path):
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("\n\n".join(SENTENCES) + "\n", encoding="utf-8")
    with pytest.warns(PbjaxWarning, match="3 of 7 lines are blank and are left out"):
        assert texts.read_sentences(sentences, 4) == list(SENTENCES)
    with pytest.warns(PbjaxWarning):
        assert texts.read_sentences(sentences, 2) == list(SENTENCES[:2])


def test_latin_1_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("Grüße\n".encode("latin-1"))
    with pytest.raises(FileError, match="UTF-8"):
        texts.read_sentences(tmp_path / "a.txt", 1)


def test_sentences_are_cut_and_padded_to_one_length():
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{word: i + 2 for i, word in enumerate(WORDS)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
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
