from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from models.kernels import HOPPER, with_kernels
from pbjax.errors import InputError, InputTypeError, ModelError, PbjaxWarning
from pbjax.inference import embedding
from pbjax.inference.embedding import embed
from pbjax.inference.packing import pack
from tests.sentence_folders import by_words

DATA = Path(__file__).parents[1] / "data"
# Of f32 sums in another order; the largest entry of a vector is about 1.
CLOSE = {"rtol": 0, "atol": 2e-6}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sat", "dog", "ran")


@cache
def bert():
    return models.load(DATA / "bert")


@pytest.fixture
def tokenizer():
    return by_words(WORDS)


def sequences(lengths):
    generator = np.random.default_rng(sum(lengths) + len(lengths))
    return [generator.integers(0, 97, length).tolist() for length in lengths]


@cache
def alone(sequence):
    """The mean and the first of the token vectors of a sequence that the model sees alone."""
    graphdef, state = nnx.split(bert())
    length = len(sequence)
    ids, mask = np.zeros((2, 1, 16), np.int32)
    ids[0, :length], mask[0, :length] = sequence, 1
    hidden = np.asarray(_call(graphdef, state, ids, mask))[0, :length]
    return hidden.mean(axis=0), hidden[0]


@partial(jax.jit, static_argnums=0)
def _call(graphdef, state, ids, mask):
    return nnx.merge(graphdef, state)(ids, mask).last_hidden_state


def expected(rows, which=0):
    return np.stack([alone(tuple(row))[which] if row else np.zeros(32) for row in rows])


# What a text becomes


@settings(max_examples=15)
@given(st.lists(st.integers(0, 16), min_size=1, max_size=60).filter(any))
def test_vectors_are_those_of_each_sequence_alone(lengths):
    rows = sequences(lengths)
    found = embed(bert(), rows, normalize=False, batch_tokens=512)
    np.testing.assert_allclose(found, expected(rows), **CLOSE)


@settings(max_examples=10)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=20), st.integers(0, 19))
def test_vector_does_not_depend_on_the_neighbours(lengths, index):
    rows = sequences(lengths)
    index %= len(rows)
    found = embed(bert(), rows, batch_tokens=512)[index]
    by_itself = embed(bert(), rows[index : index + 1], batch_tokens=512)[0]
    np.testing.assert_allclose(found, by_itself, **CLOSE)


def test_first_token_is_another_pooling():
    rows = sequences([5, 16, 1, 9, 0, 3])
    found = embed(bert(), rows, pooling="cls", normalize=False)
    np.testing.assert_allclose(found, expected(rows, which=1), **CLOSE)


def test_normalized_vectors_have_length_one():
    rows = sequences([5, 0, 16])
    found = embed(bert(), rows)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), [1, 0, 1], rtol=1e-6)
    assert found.dtype == np.float32


def test_arrays_of_ids_are_taken():
    rows = sequences([4, 7])
    found = embed(bert(), [np.array(row) for row in rows])
    np.testing.assert_array_equal(found, embed(bert(), rows))


def test_texts_that_the_model_cannot_take_whole_are_a_warning_unless_they_should_be_cut(tokenizer):
    texts = ["a cat sat", "a dog ran " * 20, "a cat " * 20]
    with pytest.warns(PbjaxWarning, match=r"2 of 3 texts have more than 16 tokens.*split them"):
        found = embed(bert(), texts, tokenizer=tokenizer)
    np.testing.assert_array_equal(found, embed(bert(), texts, tokenizer=tokenizer, max_tokens=16))


def test_texts_are_tokenized_and_cut(tokenizer):
    texts = ["a cat sat", "a dog ran " * 20]
    found = embed(bert(), texts, tokenizer=tokenizer, max_tokens=8)
    rows = [[2, 4, 5, 6, 3], [2, 4, 7, 8, 4, 7, 8, 3]]
    np.testing.assert_array_equal(found, embed(bert(), rows))


def test_kernels_give_the_same_vectors():
    rows = sequences([5, 16, 1, 9, 12])
    found = embed(with_kernels(bert(), HOPPER), rows, normalize=False)
    np.testing.assert_allclose(found, expected(rows), **CLOSE)


def test_bfloat16_model_gives_float32_vectors():
    rows = sequences([5, 16, 1, 9, 12])
    found = embed(models.load(DATA / "bert", "bfloat16"), rows)
    assert found.dtype == np.float32
    assert (found * embed(bert(), rows)).sum(axis=1).min() > 0.999


# How much is computed


def test_batches_have_few_shapes_and_a_second_call_compiles_nothing():
    rows = sequences([7] * 300)
    before = embedding._pooled._cache_size()
    embed(bert(), rows, batch_tokens=1024)
    first = embedding._pooled._cache_size() - before
    embed(bert(), rows[:290], batch_tokens=1024)
    assert embedding._pooled._cache_size() - before == first
    assert 1 <= first <= 2


def test_rows_are_full():
    assert pack([3, 16, 9, 12, 5, 7] * 160, 128).filled > 0.98


def test_row_is_no_longer_than_needed():
    found = [embedding._row_length(512, length, 16384) for length in (30, 129, 257, 500)]
    assert found == [128, 192, 384, 512]


def test_progress_counts_texts():
    steps = []
    rows = sequences([16] * 100 + [0])
    embed(bert(), rows, batch_tokens=256, progress=lambda done, total: steps.append((done, total)))
    assert steps[0] == (1, 101)
    assert steps[-1] == (101, 101)
    assert steps == sorted(steps)
    assert len(steps) > 3


# Refusals


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"texts": []}, InputError, "there are none"),
        ({"texts": [[]]}, InputError, "no text has a token"),
        ({"texts": "a cat"}, InputTypeError, r"pass \[text\]"),
        ({"texts": ["a cat"]}, InputTypeError, "texts need a tokenizers.Tokenizer"),
        ({"texts": [np.array([1.5])]}, InputTypeError, "number 0 is of dtype float64"),
        ({"texts": [np.ones((1, 2), int)]}, InputTypeError, r"number 0 is of .* shape \(1, 2\)"),
        ({"texts": [[1], [97]]}, InputError, "number 1 has token 97; 0 to 96"),
        ({"texts": [[-1]]}, InputError, "number 0 has token -1"),
        ({"texts": [[1] * 17]}, InputError, "number 0 has 17 tokens; 0 to 16"),
        ({"texts": [[1]], "max_tokens": 17}, InputError, "max_tokens=17.*1 to 16"),
        ({"texts": [[1]], "max_tokens": 0}, InputError, "max_tokens=0"),
        ({"texts": [[1]], "batch_tokens": 127}, InputError, "less than a row of 128 tokens"),
    ],
)
def test_wrong_argument_is_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        embed(bert(), **arguments)


def test_unknown_pooling_is_refused():
    with pytest.raises(InputError, match=r"pooling='first'.*cls, max, mean"):
        embed(bert(), [[1]], pooling="first")


def test_model_without_packing_is_refused():
    with pytest.raises(InputTypeError, match="a GPT2Model without packed_hidden_state"):
        embed(models.load(DATA / "gpt2"), [[1]])


def test_values_that_are_not_finite_are_an_error():
    model = nnx.merge(*nnx.split(bert()))
    model.embeddings.norm.scale[...] = model.embeddings.norm.scale[...] * np.nan
    with pytest.raises(ModelError, match="vectors of text 0 and 0 others are not finite"):
        embed(model, [[1, 2]])
