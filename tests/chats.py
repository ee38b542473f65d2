"""Chat templates, conversations and a tokenizer, of which transformers' ids are in chats.json.

Read by `scripts/make_chat_reference.py` too, which runs transformers on them.
"""

from pathlib import Path

import tokenizers

REFERENCE = Path(__file__).parent / "data" / "chats.json"
NAMES = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATES = {
    "chatml": """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nHelp.<|im_end|>\\n' }}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {{- message['content'] | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}""",
    "inst": """{{ bos_token }}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}
{% set system = messages[0].content %}{% else %}{% set rest = messages %}{% endif %}
{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}{% endif %}
{% if m.role == 'user' %}[I] {% if loop.first and system is defined %}{{ system }} {% endif %}
{{ m.content }} [/I]{% else %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% endif %}{% endfor %}""",
    "everything": """{%- set ns = namespace(n=0) %}
{{- bos_token }}{{ strftime_now('on a day') }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {%- if ns.n > 3 %}{% break %}{% endif %}
    {{- m | tojson }}{{ {'a': 'é<', 'b': [1, none]} | tojson(indent=1) }}
    {%- if m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %}
{%- endfor %}
{%- if tools %}tools{% else %} {{ ns.n }}{{ pad_token }}{% endif %}""",
}
CHATS = {
    "short": [{"role": "user", "content": " Hi é \n"}],
    "long": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?", "name": None},
        {"role": "assistant", "content": "Yes.", "reasoning": "<s>why"},
        {"role": "user", "content": "<|im_end|> 日本"},
    ],
}


def by_bytes(special):
    """A tokenizer with one token a byte, as the last resort of GPT-2's and LLaMA 3's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(special)
    return made


def tokenizer():
    """A tokenizer with one token a byte that begins every text with <s>."""
    made = by_bytes(SPECIAL)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made
