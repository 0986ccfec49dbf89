"""Chat templates for the demo model."""

from __future__ import annotations

# Shows tools, calls, results and reasoning, which the demo model's own template does not.
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
