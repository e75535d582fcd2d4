"""byte_bundle(): the text side of a model without files: each byte is a token.

Owns the tokenizer and the template. A router hashes what they make of a conversation, so equal beginnings
have equal hashes; the server renders the conversation by itself.
"""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from replicas.protocol.status import TokenizerBundle

NUM_BYTES = 256

_TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{{ '\n' }}{% endif -%}"
    "{%- for message in messages %}{{ message.role }}: "
    "{{ message.content if message.content is string else message.content | tojson }}"
    "{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '\n' }}{% endfor -%}"
)


def byte_bundle() -> TokenizerBundle:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={letter: token_id for token_id, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerBundle(
        {
            "tokenizer.json": tokenizer.to_str().encode(),
            "tokenizer_config.json": json.dumps({"chat_template": _TEMPLATE}).encode(),
        }
    )
