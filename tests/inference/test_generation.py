"""Generation from end to end on the tiny decoders, against Hugging Face and the forward pass."""

import json
from functools import cache

import jax
import numpy as np
import pytest
import tokenizers

import models
import pbjax
from pbjax.errors import InputError, InputTypeError, ModelError
from pbjax.inference.generation import api, prompts
from tests.decoders import DATA, DECODERS, call, changed, load

decoders = pytest.mark.parametrize("name", DECODERS)
# The same sizes and kinds of settings in most tests, so that few programs are compiled.
COUNTS = {"gpt2": 8, "bloom": 20, "llama": 24}
EVERYTHING = {
    "temperature": 1.5,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Compiling takes most of the time of these tests, and running next to none."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@cache
def references():
    return json.loads((DATA / "generation.json").read_text())


@cache
def tokenizer():
    """Words w0 to w96, one a token, joined by spaces."""
    vocabulary = {f"w{index}": index for index in range(97)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


def generate(name, rows=None, count=None, **options):
    rows = references()[name]["prompts"] if rows is None else rows
    return pbjax.generate(load(name), rows, max_new_tokens=count or COUNTS[name], **options)


def ids(completions):
    return [list(completion.token_ids) for completion in completions]


def padded(rows, left, right):
    """The rows in one array, each with padding on both sides, and its mask."""
    width = left + max(map(len, rows)) + right
    tokens = np.full((len(rows), width), 55, np.int32)
    mask = np.zeros((len(rows), width), np.int32)
    for index, row in enumerate(rows):
        start = left if index % 2 else width - right - len(row)
        tokens[index, start : start + len(row)] = row
        mask[index, start : start + len(row)] = 1
    return tokens, mask


# What is generated


@decoders
def test_greedy_tokens_are_those_of_hugging_face(name):
    found = generate(name)
    assert ids(found) == references()[name]["greedy"]
    assert {completion.finish_reason for completion in found} == {"length"}


@decoders
def test_penalised_tokens_are_those_of_hugging_face(name):
    expected = references()[name]
    found = generate(name, repetition_penalty=expected["repetition_penalty"])
    assert ids(found) == expected["penalised"]


@decoders
def test_log_probabilities_are_those_of_the_forward_pass(name):
    rows = references()[name]["prompts"]
    found = generate(name, **EVERYTHING)
    whole = np.zeros((3, 8 + COUNTS[name]), np.int32)
    for line, row, completion in zip(whole, rows, found, strict=True):
        line[: len(row) + COUNTS[name]] = [*row, *completion.token_ids]
    scores = np.asarray(call(load(name), input_ids=whole).logits, np.float64)
    expected = scores - np.log(np.exp(scores).sum(axis=2, keepdims=True))
    for line, row, completion in zip(expected, rows, found, strict=True):
        places = np.arange(len(row) - 1, len(row) - 1 + COUNTS[name])
        chosen = line[places, list(completion.token_ids)]
        assert np.abs(completion.log_probs - chosen).max() < 2e-5 * np.std(scores)


@decoders
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["greedy", "everything"])
def test_padding_on_either_side_changes_nothing(name, options):
    tokens, mask = padded(references()[name]["prompts"], left=3, right=2)
    found = generate(name, tokens, attention_mask=mask, **options)
    assert ids(found) == ids(generate(name, **options))


@decoders
def test_neighbours_in_the_batch_change_nothing(name):
    rows = references()[name]["prompts"]
    together = generate(name, rows, seed=[5, 6, 7], **EVERYTHING)
    alone = [generate(name, [row], seed=[5 + i], **EVERYTHING)[0] for i, row in enumerate(rows)]
    assert ids(together) == ids(alone)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


def test_seed_decides_over_a_sequence():
    rows = [[3, 4, 5]] * 3
    found = ids(generate("llama", rows, seed=[9, 1, 9], **EVERYTHING))
    assert found[0] == found[2]
    assert found[0] != found[1]
    assert found == ids(generate("llama", rows, seed=[9, 1, 9], **EVERYTHING))


def test_one_seed_means_following_ones():
    rows = [[3, 4, 5]] * 3
    one, several = (generate("llama", rows, seed=s, **EVERYTHING) for s in (4, [4, 5, 6]))
    assert ids(one) == ids(several)


def test_gpt2_may_fill_its_positions():
    row = list(range(1, 9))
    assert len(generate("gpt2", [row], 8)[0].token_ids) == 8
    with pytest.raises(InputError, match=r"prompt of 8 tokens that makes 17; the model has 16 pos"):
        generate("gpt2", [row], 9)


def test_bfloat16_model_generates():
    (found,) = pbjax.generate(load("llama", "bfloat16"), [[1, 2, 3]], max_new_tokens=5)
    assert len(found.token_ids) == 5


# Stopping and text


def test_stop_token_ends_its_sequence_alone():
    rows, expected = (references()["llama"][key] for key in ("prompts", "greedy"))
    stop = expected[1][3]
    assert stop not in expected[1][:3]
    found = generate("llama", rows, stop_tokens=[stop])
    for completion, whole in zip(found, expected, strict=True):
        end = whole.index(stop) + 1 if stop in whole else 24
        assert list(completion.token_ids) == whole[:end]
        assert completion.finish_reason == ("stop_token" if stop in whole else "length")
        assert len(completion.log_probs) == end
    assert {c.finish_reason for c in found} == {"stop_token", "length"}


def test_texts_in_and_text_out():
    text = " ".join(f"w{token}" for token in references()["llama"]["prompts"][0])
    expected = references()["llama"]["greedy"][0]
    (found,) = generate("llama", text, 24, tokenizer=tokenizer())
    assert list(found.token_ids) == expected
    assert found.text.split() == [f"w{token}" for token in expected]


def test_stop_token_is_not_in_the_text():
    expected = references()["llama"]["greedy"][0]
    stop = expected[1]
    rows = references()["llama"]["prompts"][:1]
    (found,) = generate("llama", rows, 24, tokenizer=tokenizer(), stop_tokens=[stop])
    assert found.token_ids == (expected[0], stop)
    assert found.text.split() == [f"w{expected[0]}"]


@pytest.mark.parametrize("run", ["generate", "stream"])
def test_stop_string_over_two_tokens_ends_the_text_before_it(run):
    rows, expected = (references()["llama"][key] for key in ("prompts", "greedy"))
    words = [f"w{token}" for token in expected[0]]
    stop = f"{words[18][-1]} {words[19]}"
    options = {"tokenizer": tokenizer(), "stop_strings": [stop, "nothing"]}
    if run == "generate":
        found = generate("llama", rows, 24, **options)
        tokens, text, reason = found[0].token_ids, found[0].text, found[0].finish_reason
        assert list(found[1].token_ids) == expected[1]
    else:
        steps = pbjax.stream(load("llama"), rows, max_new_tokens=24, **options)
        first = [token for token in steps if token.sequence == 0]
        tokens, reason = [token.token_id for token in first], first[-1].finish_reason
        text = "".join(token.text for token in first)
    whole = " ".join(words)
    end = whole.index(stop)
    assert reason == "stop_string"
    assert text.lstrip() == whole[:end]
    assert list(tokens) == expected[0][: whole[: end + len(stop)].count(" ") + 1]


def test_stream_yields_what_generate_returns():
    rows = references()["llama"]["prompts"]
    options = {"stop_tokens": [3], "tokenizer": tokenizer(), **EVERYTHING}
    expected = generate("llama", rows, **options)
    steps = list(pbjax.stream(load("llama"), rows, max_new_tokens=24, **options))
    assert steps[0].sequence == 0
    for index, completion in enumerate(expected):
        mine = [token for token in steps if token.sequence == index]
        assert tuple(token.token_id for token in mine) == completion.token_ids
        assert tuple(token.log_prob for token in mine) == completion.log_probs
        assert "".join(token.text for token in mine) == completion.text
        assert [token.finish_reason for token in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == completion.finish_reason


def test_stream_can_be_left():
    steps = pbjax.stream(load("llama"), [[1, 2, 3]], max_new_tokens=24)
    expected = ids(generate("llama", [[1, 2, 3]]))[0]
    assert [next(steps).token_id for _ in range(3)] == expected[:3]
    steps.close()


def test_stream_refuses_before_it_is_read():
    with pytest.raises(InputError, match="max_new_tokens=0"):
        pbjax.stream(load("llama"), [[1]], max_new_tokens=0)


# Compiling


@pytest.fixture
def compilations():
    """Names of events of compilation while the test runs."""
    events = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_one_program_a_phase_for_all_lengths_in_a_bucket(compilations):
    rows = [[1, 2, 3]] * 5
    generate("llama", rows, 40)
    first = len(compilations)
    assert first
    compilations.clear()
    generate("llama", [[4] * 15] * 5, 33)
    generate("llama", [[4] * 9] * 5, 38, stop_tokens=[7], seed=3)
    assert not compilations


def test_stream_compiles_the_same_programs(compilations):
    rows = [[1, 2, 3]] * 6
    generate("llama", rows, 30)
    compilations.clear()
    steps = pbjax.stream(load("llama"), rows, max_new_tokens=30)
    tokens = [next(steps) for _ in range(6)]
    # Reading some columns of the results is a program of its own.
    assert len(compilations) <= 1
    compilations.clear()
    tokens += list(steps)
    assert len(tokens) == 180
    assert not compilations


def test_other_settings_of_a_kind_and_other_weights_compile_nothing(compilations):
    rows = [[1, 2, 3]] * 7
    generate("llama", rows, 8, temperature=1.0, top_k=5)
    compilations.clear()
    generate("llama", rows, 8, temperature=0.3, top_k=9, top_p=0.5, min_p=0.1)
    assert not compilations
    other = changed("llama", **{"norm.scale": lambda value: value * 2})
    compilations.clear()
    pbjax.generate(other, rows, max_new_tokens=8, temperature=1.0, top_k=5)
    assert not compilations


@pytest.mark.parametrize(
    ("count", "limit", "size"),
    [(1, None, 16), (16, None, 16), (17, None, 32), (33, None, 56), (57, None, 88),
     (89, None, 136), (1000, None, 1112), (2**20 + 1, None, 2**20 + 1), (50, 60, 56), (57, 60, 60),
     (60, 60, 60), (5, 8, 8)],
)  # fmt: skip
def test_buckets(count, limit, size):
    assert prompts.bucket(count, limit) == size


# What is refused


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, r"prompts\): there are none"),
        (np.zeros((0, 4), np.int32), {}, "there are none"),
        ([[1, 2], []], {}, "number 1 has no token"),
        ([[1, 97]], {}, r"number 0 has token 97; 0 to 96 are in the vocabulary"),
        ([[1, -1]], {}, "number 0 has token -1"),
        (["a b"], {}, "there is no tokenizer"),
        (["w1"], {"tokenizer": tokenizer, "attention_mask": [[1]]}, "a mask is for token ids"),
        ([""], {"tokenizer": tokenizer}, "number 0 has no token"),
        ([[1, 2, 3]], {"attention_mask": [[1, 0, 1]]}, "row 0 has padding between its tokens"),
        ([[1, 2, 3]], {"attention_mask": [[0, 0, 0]]}, "number 0 has no token"),
        ([[1, 2, 3]], {"attention_mask": [[1, 2, 0]]}, "values besides 0 and 1"),
        ([[1, 2, 3]], {"attention_mask": [[1, 1]]}, "give one value a token"),
        ([[1, 2, 3]], {"attention_mask": [[1, 1, 1]] * 2}, "give one value a token"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"max_new_tokens": -4}, "max_new_tokens=-4"),
        ([[1]], {"max_new_tokens": 128}, "the model has 128 positions"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
        ([[1]], {"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ([[1]], {"temperature": 1.0, "top_p": 1.01}, "top_p=1.01"),
        ([[1]], {"top_k": 5}, "raise temperature or leave them out"),
        ([[1]], {"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ([[1]], {"seed": -1}, "-1 among them"),
        ([[1]], {"seed": 2**32}, "4294967296 among them"),
        ([[1]], {"stop_tokens": [97]}, r"stop_tokens\): token 97"),
        ([[1]], {"stop_strings": ["w3"]}, "there is no tokenizer"),
        ([[1]], {"stop_strings": [""], "tokenizer": tokenizer}, "non-empty texts"),
        ([[1]], {"stop_strings": "w3", "tokenizer": tokenizer}, "non-empty texts"),
    ],
)
def test_argument_without_a_meaning_is_refused(rows, options, message):
    given = {n: value() if value is tokenizer else value for n, value in options.items()}
    with pytest.raises(InputError, match=message):
        pbjax.generate(load("llama"), rows, **({"max_new_tokens": 4} | given))


# The bare functions: jaxtyping's check of the test run would come before ours.


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.5, 2.0]], "dtype float64"),
        ([1, 2, 3], r"shape \(\); .* for one prompt pass \[ids\]"),
        (["w1", 3], "texts and a int among them"),
        (np.zeros((2, 2, 2), np.int32), r"shape \(2, 2\)"),
    ],
)
def test_prompts_of_another_type_are_refused(rows, message):
    plain = getattr(prompts.read_prompts, "__wrapped__", prompts.read_prompts)
    with pytest.raises(InputTypeError, match=message):
        plain(rows, None, tokenizer(), 97)


def test_tokenizer_of_another_type_is_refused():
    plain = getattr(prompts.read_prompts, "__wrapped__", prompts.read_prompts)
    with pytest.raises(InputTypeError, match=r"tokenizer\): a str; .* models.load_tokenizer"):
        plain(["a"], None, "tokenizer.json", 97)


def test_model_without_a_cache_is_refused():
    plain = getattr(api._vocab_size, "__wrapped__", api._vocab_size)
    model = models.load(DATA / "bert")
    with pytest.raises(InputTypeError, match="a BertModel, which has no empty_cache, prefill"):
        plain(model)


def test_scores_that_are_no_numbers_are_an_error():
    broken = changed("gpt2", **{"norm.scale": lambda value: value * np.nan})
    with pytest.raises(ModelError, match="scores of token 1 after prompt 0 are not numbers"):
        pbjax.generate(broken, [[1, 2]], max_new_tokens=3)
