"""The one chat-like template that every domain and every bundled model shares."""

from __future__ import annotations

from dataclasses import dataclass

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS: tuple[str, ...] = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)
"""Special tokens; a token's place in the tuple is its id."""

PAD_ID, BOS_ID, EOS_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(6)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}<|system|>{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% else %}<|assistant|>{{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Jinja twin of :func:`render`, for ``tokenizer_config.json``."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: `role` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation of a domain; the last message is the assistant's."""

    domain: str
    messages: tuple[Message, ...]

    @property
    def prompt(self) -> str:
        """Template text up to and including the last ``<|assistant|>``."""
        return render(self.messages[:-1], add_generation_prompt=True)

    @property
    def answer(self) -> str:
        """The last assistant message, without the end token."""
        return self.messages[-1].content

    @property
    def text(self) -> str:
        """The whole conversation in template form."""
        return render(self.messages)


def render(messages: tuple[Message, ...], *, add_generation_prompt: bool = False) -> str:
    """Write `messages` in template form, beginning with ``<|bos|>``."""
    marks = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
    parts = [BOS]
    for message in messages:
        parts.append(marks[message.role] + message.content)
        if message.role == "assistant":
            parts.append(EOS)
    if add_generation_prompt:
        parts.append(ASSISTANT)
    return "".join(parts)


def ask(domain: str, user: str, answer: str, system: str | None = None) -> Example:
    """A single-turn example, with an optional system message."""
    head = (Message("system", system),) if system else ()
    return Example(domain, (*head, Message("user", user), Message("assistant", answer)))
