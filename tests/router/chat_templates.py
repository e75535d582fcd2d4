"""Chat templates in the manner of the well-known ones: what they write for reasoning, calls and results is
theirs, the instructions around it are shorter."""

_QWEN_TOOLS = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n' }}{{- CALL_SHAPE }}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""

_QWEN_RESULTS = r"""
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""

_HERMES_SHAPE = r"""'<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'"""

_JSON_CALLS = r"""
            {%- for call in message.tool_calls %}
                {%- if not loop.first or content %}{{- '\n' }}{%- endif %}
                {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
                {%- if call.function.arguments is string %}{{- call.function.arguments }}
                {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
"""

QWEN_25 = (
    _QWEN_TOOLS.replace("CALL_SHAPE", _HERMES_SHAPE)
    + r"""
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + content }}
        {%- if message.tool_calls %}"""
    + _JSON_CALLS
    + r"""
        {%- endif %}
        {{- '<|im_end|>\n' }}"""
    + _QWEN_RESULTS
    + r"""
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

QWEN_3 = (
    _QWEN_TOOLS.replace("CALL_SHAPE", _HERMES_SHAPE)
    + r"""
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- if message.tool_calls %}"""
    + _JSON_CALLS
    + r"""
        {%- endif %}
        {{- '<|im_end|>\n' }}"""
    + _QWEN_RESULTS
    + r"""
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
)

QWEN_35 = (
    _QWEN_TOOLS.replace(
        "CALL_SHAPE",
        r"'<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>'",
    )
    + r"""
{%- for message in messages %}
    {%- set content = (message.content or '') | trim %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + content.split('</think>')[-1] | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n\n' if loop.first and content else ('' if loop.first else '\n') }}
            {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for key in call.function.arguments %}
                {%- set value = call.function.arguments[key] %}
                {{- '<parameter=' + key + '>\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}"""
    + _QWEN_RESULTS
    + r"""
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}
{%- endif %}"""
)

QWEN_3_CODER = (
    _QWEN_TOOLS.replace("CALL_SHAPE", r"'<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>'")
    + r"""
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + content | trim }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}
            {%- if tool_call.arguments is defined %}
                {%- for args_name, args_value in tool_call.arguments|items %}
                    {{- '<parameter=' + args_name + '>\n' }}
                    {%- set args_value = args_value | tojson | safe if args_value is mapping
                        or (args_value is sequence and args_value is not string) else args_value | string %}
                    {{- args_value + '\n</parameter>\n' }}
                {%- endfor %}
            {%- endif %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}"""
    + _QWEN_RESULTS
    + r"""
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

HERMES = (
    r"""{{- bos_token }}"""
    + _QWEN_TOOLS.replace(
        "CALL_SHAPE", r"""'<tool_call>\n{"arguments": <object>, "name": <name>}\n</tool_call>'"""
    )
    + r"""
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not tools)
        or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n' }}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\n' }}
        {{- '<tool_response>\n' + content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

LLAMA_31 = r"""{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if tools and loop.first %}
        {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
        {{- 'Answer with {"name": <name>, "parameters": <object>}\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
        {{- '<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

DEEPSEEK_R1 = r"""{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}"""

GLM_45 = r"""
{%- if tools %}
    {{- '<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>' }}
{%- endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>\n' + message.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n<think></think>' }}{%- endif %}"""

_WALKED = r"""
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- if call.function %}{%- set call = call.function %}{%- endif %}
        {{- '\n<tool_call>' + call.name + '\n' }}
        {%- set _args = call.arguments %}
        {%- for k, v in _args.items() %}
            {{- 'KEY' }}{{- v | tojson(ensure_ascii=False) if v is not string else v }}{{- 'END\n' }}
        {%- endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"""

GLM_46 = _WALKED.replace("'KEY'", "'<arg_key>' + k + '</arg_key>\\n<arg_value>'").replace(
    "END", "</arg_value>"
)

MINIMAX_M2 = _WALKED.replace("'KEY'", """'<parameter name="' + k + '">'""").replace("END", "</parameter>")

PLAIN = r"""
{%- for message in messages %}{{- '[' + message.role + '] ' + message.content + '\n' }}{%- endfor %}"""
