"""A shop assistant with a tool, written on the plain `openai` package.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python cookbook/agents/shop.py "What does a kettle cost?"
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from openai import OpenAI

MODEL = "gpt-4o-mini"
MAX_TURNS = 3
MAX_TOKENS = 40
PRICES = {  # in euros
    "lamp": 31,
    "kettle": 24,
    "chair": 57,
    "mirror": 43,
    "clock": 18,
    "basket": 12,
    "blanket": 36,
    "table": 94,
    "vase": 27,
    "candle": 8,
    "carpet": 85,
    "pillow": 21,
    "shelf": 62,
    "bottle": 14,
    "ladder": 73,
    "hammer": 16,
    "bucket": 11,
    "mug": 9,
    "towel": 13,
    "curtain": 48,
    "stool": 39,
    "broom": 17,
    "plate": 6,
    "radio": 66,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    }
]


def answer(client: OpenAI, question: str) -> str:
    """The assistant's last words; "" where it calls tools without end."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        messages += results(message.tool_calls)
    return ""


def results(calls: list[Any]) -> Iterator[dict[str, Any]]:
    for call in calls:
        yield {"role": "tool", "tool_call_id": call.id, "content": price(call.function.arguments)}


def price(arguments: str) -> str:
    """What the tool says; models write all kinds of arguments."""
    try:
        return f"{PRICES[json.loads(arguments)['item']]} euros"
    except (ValueError, LookupError, TypeError):
        return "unknown item"


if __name__ == "__main__":
    print(answer(OpenAI(), sys.argv[1]))
