"""Chat templates for the demo model."""

from __future__ import annotations

# Shows tools, calls, results and reasoning in forms of its own.
TOOL_TEMPLATE = """{{ bos_token }}
{%- for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.parameters | tojson }}
{% endfor -%}
{%- for message in messages -%}
<|{{ message.role if message.role != 'tool' else 'user' }}|>
{%- if message.reasoning %}({{ message.reasoning }}){% endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %} {{ call.function.name }}({{ call.function.arguments | tojson }})
{%- endfor -%}
{{ eos_token }}
{%- endfor -%}
{%- if enable_thinking is defined %} thinks={{ enable_thinking }}{% endif -%}
{%- if reasoning_effort is defined %} effort={{ reasoning_effort }}{% endif -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""

# Shows neither tools nor their messages, as templates of many small models.
WITHOUT_TOOLS = """{{ bos_token }}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no ' + message.role) }}{% endif -%}
{{ '<|' + message.role + '|>' + message.content | trim + eos_token }}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
# Refuses the role "system", and roles that do not alternate.
GEMMA_LIKE = """{{ bos_token }}
{%- for message in messages -%}
{%- if message.role == 'system' %}{{ raise_exception('no system') }}{% endif -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no order') }}{% endif -%}
<{{ 'model' if message.role == 'assistant' else message.role }}>{{ message.content | trim + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}<model>{% endif -%}
"""
