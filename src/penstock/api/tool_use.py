"""What a chat request's tools ask of the model that serves it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.bodies import ChatBody, NamedTool
from penstock.api.errors import ApiError
from penstock.api.tool_calls import ToolCallParser, ToolFormat, format_of


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Calls that may be in an answer. names: of the tools. whole, most: as the parser takes
    them."""

    form: ToolFormat
    names: frozenset[str]
    whole: bool
    most: int | None

    @property
    def marks(self) -> set[str]:
        """What is part of the text, even if the vocabulary has a special token for it."""
        return {*self.form.closings, *self.form.closings.values()}

    def parser(self) -> ToolCallParser:
        return ToolCallParser(self.form, self.names, whole=self.whole, most=self.most)


def tool_use(body: ChatBody, template: str | None) -> ToolUse | None:
    """What to look for in the answers; None without tools. template: the model's, for chats with
    tools. Raises: ApiError where model or server cannot do it."""
    form = format_of(template)
    about_tools = [i for i, message in enumerate(body.messages) if message.is_about_tools]
    if form is None and (about_tools or body.offered_tools):
        param = f"messages.{about_tools[0]}" if about_tools else "tools"
        raise ApiError(
            400,
            f"{param}: the model's chat template has no tools in a format that this server reads "
            "(Hermes' or Llama 3's)",
            param=param,
            code="unsupported_value",
        )
    names = [tool.function.name for tool in body.tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(400, f"tools: two of them are called {twice!r}", param="tools")
    _check_choice(body, names)
    if form is None or not body.offered_tools:
        return None
    most = None if body.parallel_tool_calls else 1
    return ToolUse(form, frozenset(names), not body.stream, most)


def _check_choice(body: ChatBody, names: list[str]) -> None:
    """Raises: ApiError."""
    choice = body.tool_choice
    if choice in ("none", "auto"):
        return
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        message = f"no tool is called {choice.function.name!r}"
        raise ApiError(400, f"tool_choice: {message}", param="tool_choice")
    raise ApiError(
        400,
        'tool_choice: only "none" or "auto" is supported',
        param="tool_choice",
        code="unsupported_value",
    )
