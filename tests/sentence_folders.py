"""Small sentence-transformers folders around the BERT of tests/data, and calls of them.

Read by `scripts/make_sentence_reference.py` too, which runs sentence-transformers on them.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

DATA = Path(__file__).parent / "data"
REFERENCE = DATA / "sentence_vectors.npz"
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sat", "dog", "ran", "find", "about", ":")
TEXTS = ("a cat sat", "", "A Dog ran about", "dog", "a cat sat about a dog : a dog ran")
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPTS = {"prompts": {"query": "find : ", "passage": "about"}, "default_prompt_name": "query"}
TANH, GELU = (f"torch.nn.modules.activation.{name}" for name in ("Tanh", "GELU"))
DENSE = {"in_features": 32, "out_features": 8, "bias": True, "activation_function": TANH}
RESIDUAL = {**DENSE, "bias": False, "activation_function": GELU, "use_residual": True}
SQUARE = {**DENSE, "out_features": 32, "use_residual": True}


def legacy(*modes):
    """The configuration of a Pooling as most folders have it."""
    keys = {
        "cls": "pooling_mode_cls_token",
        "mean": "pooling_mode_mean_tokens",
        "max": "pooling_mode_max_tokens",
        "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
        "weightedmean": "pooling_mode_weightedmean_tokens",
        "lasttoken": "pooling_mode_lasttoken",
    }
    chosen = {key: mode in modes for mode, key in keys.items()}
    return {"word_embedding_dimension": 32, **chosen, "include_prompt": True}


def listed(*modes, **others):
    return {"embedding_dimension": 32, "pooling_mode": list(modes), **others}


# What stands in a folder, and what its vectors are asked with.
# Two lists of modes in all: each is a program.
CASES = {
    "modes": ({"pooling": listed(*MODES)}, {}),
    "silent": ({"pooling": {"word_embedding_dimension": 32}}, {}),
    "dense": ({"pooling": legacy("mean"), "layers": [("Dense", DENSE), ("Normalize", {})]}, {}),
    "residual": ({"pooling": legacy("mean"), "layers": [("Dense", RESIDUAL)]}, {}),
    "layers": (
        {
            "pooling": legacy("mean"),
            "layers": [
                ("Dropout", {"dropout": 0.5}),
                ("Dense", SQUARE),
                ("LayerNorm", {"dimension": 32}),
            ],
        },
        {},
    ),
    "cut": ({"pooling": legacy("mean"), "encoder": {"max_seq_length": 6}}, {}),
    "tokenizer_cut": ({"pooling": legacy("mean"), "model_max_length": 5}, {}),
    "lower": (
        {"pooling": legacy("mean"), "encoder": {"max_seq_length": 12, "do_lower_case": True}},
        {},
    ),
    "default_prompt": ({"pooling": legacy("mean"), "prompts": PROMPTS}, {}),
    "prompt_name": ({"pooling": legacy("mean"), "prompts": PROMPTS}, {"prompt_name": "passage"}),
    "prompt": ({"pooling": legacy("mean"), "prompts": PROMPTS}, {"prompt": "a dog "}),
    "no_prompt": ({"pooling": legacy("mean"), "prompts": PROMPTS}, {"prompt": ""}),
    "excluded": ({"pooling": listed(*MODES, include_prompt=False), "prompts": PROMPTS}, {}),
}


def by_words(words):
    """A tokenizer with one token a word, of which the third and fourth stand around a text."""
    vocabulary = {word: index for index, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def tokenizer():
    made = by_words(WORDS)
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return made


def write(path, fields):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(fields))


def make(path, *, pooling, layers=(), encoder=None, prompts=None, model_max_length=16, prefix=None):
    """Writes a folder; `prefix` is what the types of modules begin with."""
    prefix = prefix or "sentence_transformers.models."
    path.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(DATA / "bert" / file, path / file)
    tokenizer().save(str(path / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model_max_length}
    write(path / "tokenizer_config.json", names | kind)
    modules = [("Transformer", None), ("Pooling", pooling), *layers]
    entries = []
    for index, (kind, fields) in enumerate(modules):
        place = f"{index}_{kind}" if index else ""
        entries.append({"idx": index, "name": str(index), "path": place, "type": prefix + kind})
        if place:
            write(path / place / "config.json", fields)
        if tensors := weights(kind, fields):
            save_file(tensors, path / place / "model.safetensors")
    write(path / "modules.json", entries)
    if encoder is not None:
        write(path / "sentence_bert_config.json", encoder)
    if prompts is not None:
        write(path / "config_sentence_transformers.json", prompts)
    return path


def weights(kind, fields):
    """The tensors of a module, which depend on its kind alone."""
    numbers = np.random.default_rng(5)

    def drawn(*shape):
        return numbers.normal(0, 0.3, shape).astype(np.float32)

    if kind == "LayerNorm":
        return {"norm.weight": drawn(fields["dimension"]), "norm.bias": drawn(fields["dimension"])}
    if kind != "Dense":
        return {}
    outputs, inputs = fields["out_features"], fields["in_features"]
    found = {"linear.weight": drawn(outputs, inputs)}
    if fields["bias"]:
        found["linear.bias"] = drawn(outputs)
    if fields.get("use_residual") and inputs != outputs:
        found["residual.weight"] = drawn(outputs, inputs)
    return found
