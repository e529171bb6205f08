"""A chat template, and a tokenizer that has its special tokens."""

import tokenizers

from rmt_tpu.data.bpe import BpeTokenizer

# ChatML, spread over lines as today's templates are.
CHATML = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message.content }}{%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def special_tokenizer() -> BpeTokenizer:
    """Bytes, and the names of four special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: n for n, c in enumerate(alphabet)}, [])
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return BpeTokenizer.from_json("x", library.to_str())
