"""Chat templates with tools in the manner of four families, as short as they can be, and a conversation with tools."""

from __future__ import annotations

from functools import cache
from typing import Any

from heedful.text import Tokenizer, train_bpe
from support.trainings import story

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\\nYou may call functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall one by <tool_call></tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
HERMES = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{- message.content or '' }}{%- endif %}
{%- if loop.first and tools is defined and tools %}
{{- ' <tools> ' }}{%- for tool in tools %}{{- tool.function | tojson }}{{- '\\n' }}{%- endfor %}{{- '</tools>' }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' }}{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|im_end|>' }}
{%- else %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'user' and tools is not none and loop.first %}
{{- 'Answer with {"name": function name, "parameters": its arguments}.\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- message.content }}{{- '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.first %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- message.content + eos_token }}
{%- endif %}
{%- endfor %}
"""
TEMPLATES = {"qwen": QWEN, "hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function all of whose arguments are required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": parameters}}


TOOLS = [
    tool(
        "get_weather",
        city={"type": "string", "enum": ["Basel", "Zürich"]},
        days={"type": "integer", "minimum": 0, "maximum": 9},
    ),
    tool("get_time", zone={"$ref": "#/$defs/Zone"}),
]
TOOLS[1]["function"]["parameters"]["$defs"] = {"Zone": {"enum": ["UTC", "CET"]}}


def conversation(arguments: Any) -> list[dict[str, Any]]:
    """A question, a call of get_weather, its result."""
    call = {"id": "abcdef123", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Is it cold?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdef123", "content": '{"celsius": 3}'},
    ]


@cache
def trained() -> Tokenizer:
    """A byte-level BPE of 500 tokens with the special tokens of all these templates."""
    return train_bpe([story(200, seed=3), str(TOOLS)] * 2, 500, special=SPECIAL)


def tool_tokenizer(template: str) -> Tokenizer:
    """The same for every template."""
    return Tokenizer(trained().backend, roles=trained().roles, chat_template=template)
