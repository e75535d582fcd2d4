"""A model that takes images: its template and its rule for them."""

from replicas.protocol.image_rules import CellRule

TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}"
    "{%- for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<|endoftext|>' }}{%- endfor %}{%- endif %}"
    "{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
RULE = CellRule(placeholder=0, cell=4, min_pixels=16, max_pixels=16 * 1000)
