import openai
from openai.types.chat import ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a penstock?"},
]
ECHO = "Be brief.What is a penstock?"
"""The toy engine repeats its prompt; the template's marks are special tokens and not shown."""
GO_ON = {"ignore_eos": True}


def test_a_chat_completion(ai: openai.OpenAI) -> None:
    made = ai.chat.completions.create(
        model="toy", messages=MESSAGES, max_completion_tokens=12, extra_body=GO_ON
    )
    message = made.choices[0].message
    assert message.role == "assistant"
    assert message.content
    assert ECHO.startswith(message.content)
    assert made.choices[0].finish_reason == "length"
    assert made.usage.completion_tokens == 12
    assert made.id.startswith("chatcmpl-")


def test_a_streamed_chat(ai: openai.OpenAI) -> None:
    chunks = list(
        ai.chat.completions.create(
            model="toy",
            messages=MESSAGES,
            max_tokens=12,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=GO_ON,
        )
    )
    for index in range(2):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert ECHO.startswith("".join(c.delta.content or "" for c in mine))
        assert mine[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 24


def test_chat_logprobs(ai: openai.OpenAI) -> None:
    made = ai.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
        extra_body=GO_ON,
    )
    choice = made.choices[0]
    content = choice.logprobs.content
    assert len(content) == 12
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.logprob == -0.25 for token in content)
    shown = b"".join(bytes(t.bytes or ()) for t in content if not t.token.startswith("<|"))
    assert shown.decode() == choice.message.content


def test_streamed_chat_logprobs(ai: openai.OpenAI) -> None:
    stream = ai.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=12, logprobs=True, stream=True, extra_body=GO_ON
    )
    tokens = []
    for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        tokens += (logprobs.content or []) if logprobs is not None else []
    assert len(tokens) == 12
    assert all(token.top_logprobs == [] for token in tokens)
