"""From request bodies to the engine's requests."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from penstock.api.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    PredictedBody,
)
from penstock.api.body import Structure
from penstock.api.choices import ResponseChoice, TextStream
from penstock.api.conversation import COST_PER_TEXT, Conversation
from penstock.api.errors import ApiError, ContextOverflow
from penstock.api.http import Caller
from penstock.api.reasoning import ReasoningFormat, reasoning_of
from penstock.api.token_bodies import DetokenizeBody, TokenizeBody
from penstock.api.tool_use import ToolUse, tool_use
from penstock.core.types import (
    AUTO_DRAFTER,
    MIN_TEMPERATURE,
    NO_DRAFTER,
    Request,
    SamplingParams,
    StopStrings,
)
from penstock.engine.fill import FillTokens
from penstock.engine.grammar import GrammarCompiler, GrammarError, behind, grammar_of
from penstock.serving.limits import Quotas
from penstock.serving.messages import Ready

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer
_T = TypeVar("_T")
_U = TypeVar("_U")

_DEFAULT_COMPLETION_TOKENS = 16

_LONG_TEXT = 8192
"""Characters. Longer texts are tokenised in a thread, so that streams do not stand still."""

_EFFORTS = ("reasoning_effort", "enable_thinking")
"""Variables of chat templates that say how much the model thinks."""

_COMPILE_S = 20.0
"""Timeout of a grammar, including those queued before it and the loading of the vocabulary."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt, and what its choices share.

    max_tokens: of the output. last: token that the text continues, or None. shown: special tokens
    that are part of the text. scored: its own log-probabilities are asked for"""

    token_ids: tuple[int, ...]
    prediction: tuple[int, ...]
    max_tokens: int
    last: int | None
    grammar: str | None
    shown: frozenset[int] = frozenset()
    scored: bool = False


@dataclass(slots=True)
class RequestBuilder:
    """Turns bodies into engine requests for one model.

    verification: of every request, or None: `coupled` with a seed, `ratio` without
    drafters: names that a request may give now; draft servers come and go
    max_choices: limit of one client's body, over all its prompts
    quotas: limits of tenants"""

    model_names: Sequence[str]
    tokenizer: Tokenizer
    engine: Ready
    verification: Literal["coupled", "ratio"] | None
    drafters: Callable[[], tuple[str, ...]]
    max_choices: Callable[[str], int]
    quotas: Quotas
    _grammars: GrammarCompiler = field(init=False)
    _long_texts: Executor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "penstock-tokenizer")
    )
    """One thread: tokenising a text takes up to a thousand times its size in memory."""

    def __post_init__(self) -> None:
        eos = sorted(self.engine.eos_token_ids)
        self._grammars = GrammarCompiler(lambda: self.tokenizer, self.engine.vocab_size, eos)

    async def completion(
        self, body: CompletionBody, caller: Caller, job_id: str, *, clips: bool = False
    ) -> list[ResponseChoice]:
        """Return the choices of a completion, those of the first prompt first. Raises: ApiError.

        clips: max_tokens over the context is lowered, not refused; without it, all of the context.
        """
        given = body.prompts
        self._check(body, caller, len(given))
        scores_prompt = body.echo and body.logprobs is not None
        if scores_prompt and not self.engine.scores_prompts:
            message = "echo: this server's engine tells no log-probabilities of a prompt"
            raise ApiError(400, message, param="echo", code="unsupported_value")
        if not given:
            raise ApiError(400, "prompt: must not be empty", param="prompt")
        fill = self.fill_tokens() if body.suffix else None
        suffix = await self.text_ids(body.suffix, "suffix")
        ends = fill.ends if fill is not None and not body.ignore_eos else frozenset[int]()
        prediction = await self._prediction(body)
        size = sum(COST_PER_TEXT + len(prompt) for prompt in given if isinstance(prompt, str))

        def encode(prompt: str | list[int]) -> list[int]:
            is_text, adds_special = isinstance(prompt, str), body.add_special_tokens
            if isinstance(prompt, str):
                adds_inside = adds_special and fill is None
                prompt = self._encode(prompt, "prompt", add_special_tokens=adds_inside)
            if fill is not None:
                begin = self.tokenizer.encode("") if is_text and adds_special else []
                prompt = begin + fill.prompt(prompt, suffix)
            return self._checked(prompt, "prompt")

        # One by one, so that the texts of other requests can go between.
        prompts = [tuple(await self.tokenise(size, encode, prompt)) for prompt in given]
        grammar = await _compiled(body.structures, body.ignore_eos, self._grammars)
        choices: list[ResponseChoice] = []
        for prompt in prompts:
            last = self.tokenizer.last_of_text(prompt) if body.stops or not body.echo else None
            limit = self._max_tokens(
                body, body.max_tokens, _DEFAULT_COMPLETION_TOKENS, len(prompt), caller.tenant, clips
            )
            shared = _Prompt(prompt, prediction, limit, last, grammar, scored=scores_prompt)
            for n in range(body.n):
                index = len(choices)
                request = self._request(body, f"{job_id}-{index}", n, shared, caller.tenant)
                choices.append(
                    ResponseChoice(
                        index,
                        replace(request, stop_token_ids=request.stop_token_ids | ends),
                        # With its prompt a text begins; without it one goes on.
                        TextStream(self.tokenizer, body.stops, None if body.echo else last),
                        opens_prompt=n == 0,
                        tells_origins=body.speculation.origins,
                        echo=body.echo,
                        adds_text=body.max_tokens != 0,
                    )
                )
        return choices

    async def chat(
        self, body: ChatBody, caller: Caller, job_id: str, *, clips: bool = False
    ) -> list[ResponseChoice]:
        """Return the choices of a chat completion, by default as long as the context allows.

        clips: as of a completion. Raises: ApiError."""
        self._check(body, caller, 1)
        chat, thinks, tools = self._read_chat(body)
        special = {text: i for i, text in self.tokenizer.special_tokens.items()}
        structures, marks = body.structures, set[str]() if thinks is None else thinks.marks
        if tools is not None:
            structures = await asyncio.to_thread(tools.shaped, structures, special)
            marks |= tools.form.marks
        shown = self.tokenizer.special_ids(marks)

        def encode(chat: Conversation) -> tuple[list[int], str]:
            text = self._chat_text(chat)
            token_ids = self._encode(text, "messages", add_special_tokens=body.add_special_tokens)
            return self._checked(token_ids, "messages"), text

        token_ids, text = await self.tokenise(chat.size, encode, chat)
        prompt = tuple(token_ids)
        prediction = await self._prediction(body)
        before = None
        if thinks is not None:
            # Grammars that were made for tools have the text's head themselves.
            heads = all(s.kind != "lark" for s in structures)
            before = thinks.rules(special, text, chat.continued, heads=heads)
        grammar = await _compiled(structures, body.ignore_eos, self._grammars, before)
        wanted = body.max_completion_tokens or body.max_tokens
        limit = self._max_tokens(
            body, wanted, self.engine.max_request_tokens, len(prompt), caller.tenant, clips
        )
        last = self.tokenizer.last_of_text(prompt) if chat.continues else None
        shared = _Prompt(prompt, prediction, limit, last, grammar, shown)
        return [
            ResponseChoice(
                n,
                self._request(body, f"{job_id}-{n}", n, shared, caller.tenant),
                TextStream(self.tokenizer, body.stops, last, shown),
                opens_prompt=n == 0,
                tells_origins=body.speculation.origins,
                reasoning=None if thinks is None else thinks.parser(text, chat.continued),
                calls=None if tools is None else tools.parser(),
            )
            for n in range(body.n)
        ]

    async def chat_prompt(self, body: ChatBody) -> str:
        """Return a conversation's text, without what begins every text prompt. Raises: ApiError."""
        if body.model:
            self.check_model(body.model)
        chat, _, _ = self._read_chat(body)
        text = await self.tokenise(chat.size, self._chat_text, chat)
        begin = self.tokenizer.decode(self.tokenizer.encode(""), skip_special_tokens=False)
        return text.removeprefix(begin)

    def _read_chat(
        self, body: ChatBody
    ) -> tuple[Conversation, ReasoningFormat | None, ToolUse | None]:
        """Return a conversation, and how reasoning and tools are written. Raises: ApiError."""
        template = self.tokenizer.tool_template
        thinks = reasoning_of(template)
        tools = tool_use(body, template, thinks=thinks is not None) if body.uses_tools else None
        chat = replace(
            Conversation.from_messages(
                body.messages, body.offered_tools, body.add_generation_prompt
            ),
            continues=body.continue_final_message,
            variables=self._variables(body),
            lead="" if tools is None else tools.lead,
        )
        return chat, thinks, tools

    async def token_ids(self, body: TokenizeBody) -> list[int]:
        """Return the tokens of a text or a conversation within the context. Raises: ApiError."""
        if body.model is not None:
            self.check_model(body.model)
        if body.content is not None:
            parts = [body.content] if isinstance(body.content, str) else body.content
            plain = not body.parse_special
            return await self.mixed_ids(parts, "content", begins=body.add_special, plain=plain)
        adds = body.add_special_tokens
        if body.prompt is not None:
            encode = partial(self._encode, param="prompt", add_special_tokens=adds is not False)
            return await self.tokenise(COST_PER_TEXT + len(body.prompt), encode, body.prompt)
        chat = Conversation.from_messages(body.messages, body.tools, body.add_generation_prompt)

        def encode_chat(chat: Conversation) -> list[int]:
            return self._encode(self._chat_text(chat), "messages", add_special_tokens=bool(adds))

        return await self.tokenise(chat.size, encode_chat, chat)

    async def text(self, body: DetokenizeBody) -> str:
        """Return the text of tokens, special ones included. Raises: ApiError."""
        if body.model is not None:
            self.check_model(body.model)
        self.check_ids(body.tokens, "tokens")
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        return await self.tokenise(len(body.tokens), decode, body.tokens)

    async def tokenise(self, size: int, work: Callable[[_T], _U], given: _T) -> _U:
        """Run `work`, in a thread for long texts (`size` characters). Raises: as `work`."""
        if size <= _LONG_TEXT:
            return work(given)
        return await asyncio.get_running_loop().run_in_executor(self._long_texts, work, given)

    def check_model(self, name: str) -> None:
        """Raises: ApiError for any model but this server's."""
        if name not in self.model_names:
            known = ", ".join(map(repr, self.model_names))
            message = f"model {name!r} does not exist; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _check(self, body: GenerationBody, caller: Caller, num_prompts: int) -> None:
        """Check what does not depend on the prompt's tokens. Raises: ApiError."""
        if not self.engine.generates:
            message = f"the model {self.model_names[0]!r} makes embeddings and no text"
            raise ApiError(400, message, param="model", code="unsupported_model")
        if body.model:  # llama.vim's is empty
            self.check_model(body.model)
        drafters = (AUTO_DRAFTER, NO_DRAFTER, *self._drafters_of(caller.tenant))
        if body.speculation.drafter not in drafters:
            raise ApiError(
                400,
                f"speculation.drafter: unknown drafter {body.speculation.drafter!r}; "
                f"choose from {', '.join(drafters)}",
                param="speculation.drafter",
            )
        most = self.max_choices(caller.client)
        if num_prompts * body.n > most:
            raise ApiError(
                400,
                f"n: {num_prompts} prompts with {body.n} choices each are {num_prompts * body.n}; "
                f"together at most {most} are allowed",
                param="n",
            )
        self.check_ids(body.stop_token_ids, "stop_token_ids")
        self.check_ids([int(token) for token in body.logit_bias], "logit_bias")

    def _variables(self, body: ChatBody) -> dict[str, Any]:
        """Return the chat template's variables that a body sets. Raises: ApiError."""
        knows, effort = self.tokenizer.has_variable, body.reasoning_effort
        found = {k: v for k, v in body.chat_template_kwargs.items() if knows(k)}
        if effort is not None and knows("reasoning_effort"):
            found.setdefault("reasoning_effort", effort)
        elif effort is not None and knows("enable_thinking"):
            found.setdefault("enable_thinking", effort != "none")
        if body.documents:
            if not knows("documents"):
                message = "documents: the model's chat template takes none"
                raise ApiError(400, message, param="documents", code="unsupported_value")
            found["documents"] = body.documents
        return found

    def unused_fields(self, effort: str | None, variables: Iterable[str] = ()) -> list[str]:
        """Return names of fields that the chat template does not read: variables, and effort."""
        knows = self.tokenizer.has_variable
        unused = [f"chat_template_kwargs.{name}" for name in variables if not knows(name)]
        if effort is not None and not any(map(knows, _EFFORTS)):
            unused.append("reasoning_effort")
        return unused

    def _drafters_of(self, tenant: str) -> Iterable[str]:
        allowed = self.quotas.config_of(tenant).allowed_drafters
        return (name for name in self.drafters() if allowed is None or name in allowed)

    def _chat_text(self, chat: Conversation) -> str:
        try:
            text = self.tokenizer.chat_text(
                chat.messages,
                chat.is_asked and not chat.continues,
                chat.tools,
                chat.continues,
                chat.variables,
            )
            return text + chat.lead
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error

    def fill_tokens(self, param: str = "suffix") -> FillTokens:
        """Return the model's tokens to fill in the middle. Raises: ApiError without."""
        found = FillTokens.of(self.tokenizer)
        if found is None:
            message = f"{param}: this model has no fill-in-the-middle tokens"
            raise ApiError(400, message, param=param, code="unsupported_value")
        return found

    async def _prediction(self, body: PredictedBody) -> tuple[int, ...]:
        """Raises: ApiError, also at a draft server, whose link carries none."""
        if body.prediction is not None and self.engine.draft_model is not None:
            message = "prediction: a draft server takes none; its verification server does"
            raise ApiError(400, message, param="prediction", code="unsupported_value")
        return await self.text_ids(body.predicted_text, "prediction")

    async def text_ids(self, text: str, param: str) -> tuple[int, ...]:
        """Return the tokens of a text within another. Raises: ApiError."""
        if not text:
            return ()
        encode = partial(self._encode, param=param, add_special_tokens=False)
        token_ids = await self.tokenise(len(text), encode, text)
        self.check_ids(token_ids, param)
        return tuple(token_ids)

    async def mixed_ids(
        self, parts: Sequence[str | int], param: str, *, begins: bool = True, plain: bool = False
    ) -> list[int]:
        """Return the tokens of texts and tokens in a row. Raises: ApiError.

        begins: a text in front has the tokens that begin one. plain: texts that spell special
        tokens, which would be these, are refused."""
        special = self.tokenizer.special_tokens.values() if plain else ()

        def encode(parts: Sequence[str | int]) -> list[int]:
            is_begun = not (begins and isinstance(next(iter(parts), 0), str))
            found = [] if is_begun else self.tokenizer.encode("")
            for part in parts:
                if isinstance(part, str):
                    if any(spelling in part for spelling in special):
                        message = f"{param}: spells special tokens, which are never read as text"
                        raise ApiError(400, message, param=param, code="unsupported_value")
                    found += self._encode(part, param, add_special_tokens=False)
                else:
                    found.append(part)
                if len(found) > self.engine.max_request_tokens:
                    raise ContextOverflow(len(found), self.engine.max_request_tokens, param)
            self.check_ids(found, param)
            return found

        texts = [part for part in parts if isinstance(part, str)]
        return await self.tokenise(sum(COST_PER_TEXT + len(t) for t in texts), encode, parts)

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        limit = self.engine.max_request_tokens
        token_ids = self.tokenizer.encode_within(text, limit, add_special_tokens)
        if isinstance(token_ids, int):
            raise ContextOverflow(token_ids, limit, param)
        return token_ids

    def _checked(self, token_ids: list[int], param: str) -> list[int]:
        if not token_ids:
            raise ApiError(400, f"{param}: must not be empty", param=param)
        if len(token_ids) >= self.engine.max_request_tokens:
            raise ContextOverflow(len(token_ids), self.engine.max_request_tokens, param)
        self.check_ids(token_ids, param)
        return token_ids

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises: ApiError for tokens that the model has not."""
        highest = self.engine.vocab_size - 1
        if max(token_ids, default=0) > highest:
            message = f"{param}: token ids go from 0 to {highest}, not to {max(token_ids)}"
            raise ApiError(400, message, param=param)

    def _max_tokens(
        self,
        body: GenerationBody,
        wanted: int | None,
        default: int,
        prompt_len: int,
        tenant: str,
        clips: bool,
    ) -> int:
        """Return the output limit of a choice. Raises: ApiError where it does not fit."""
        room = self.engine.max_request_tokens - prompt_len
        if clips:
            default, wanted = room if wanted is None else wanted, None
        if wanted is not None and wanted > room:
            raise ContextOverflow(prompt_len, prompt_len + room, "max_tokens", wanted)
        most = self.quotas.most_output(tenant, prompt_len)
        unasked = min(default, room, room if most is None else most)
        num_tokens = unasked if wanted is None else wanted
        if body.min_tokens > num_tokens:
            most_told = f"may be at most max_tokens, {num_tokens}, not {body.min_tokens}"
            raise ApiError(400, f"min_tokens: {most_told}", param="min_tokens")
        return max(1, num_tokens)

    def _request(
        self,
        body: CompletionBody | ChatBody,
        request_id: str,
        n: int,
        prompt: _Prompt,
        tenant: str,
    ) -> Request:
        """Return the engine's request for choice `n` of a prompt."""
        eos = frozenset() if body.ignore_eos else self.engine.eos_token_ids
        expected = body.expected_output_tokens
        return Request(
            id=request_id,
            prompt_len=len(prompt.token_ids),
            max_tokens=prompt.max_tokens,
            tenant=tenant,
            prompt_token_ids=prompt.token_ids,
            stop_token_ids=eos | frozenset(body.stop_token_ids),
            sampling=self._sampling(body, n, prompt),
            drafter=body.speculation.drafter,
            max_draft_tokens=body.speculation.max_draft_tokens,
            expected_output_tokens=None if expected is None else min(expected, prompt.max_tokens),
            latency=body.latency.target,
            stop=StopStrings(body.stops, prompt.last, prompt.shown) if body.stops else None,
            prediction=prompt.prediction,
        )

    def _sampling(self, body: CompletionBody | ChatBody, n: int, prompt: _Prompt) -> SamplingParams:
        seed = secrets.randbits(64) if body.seed is None else derived_seed(body.seed % 2**64, n)
        is_greedy = body.temperature < MIN_TEMPERATURE or body.top_p == 0
        by_seed: Literal["coupled", "ratio"] = "ratio" if body.seed is None else "coupled"
        return SamplingParams(
            # Of the most likely tokens, at least one is kept.
            temperature=0.0 if is_greedy else body.temperature,
            top_p=body.top_p or 1.0,
            top_k=max(0, body.top_k),
            seed=seed,
            verification=self.verification or by_seed,
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.num_logprobs if prompt.scored else None,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            min_p=body.min_p,
            min_tokens=body.min_tokens,
            grammar=prompt.grammar,
            logit_bias=tuple(sorted((int(k), v) for k, v in body.logit_bias.items())),
        )


async def _compiled(
    structures: list[Structure],
    ignore_eos: bool,
    compiler: GrammarCompiler,
    before: str | None = None,
) -> str | None:
    """Return the validated grammar of a body, or None. before: as in `behind`. Raises: ApiError."""
    if not structures:
        return None
    field, kind, value = structures[0]
    if len(structures) > 1:
        second = structures[1].field
        message = f"{second}: only one field may say what the text is to be, and {field} does"
        raise ApiError(400, message, param=second)
    if ignore_eos:
        message = f"{field}: is not allowed with ignore_eos, for its grammar ends the text"
        raise ApiError(400, message, param=field)
    try:
        async with asyncio.timeout(_COMPILE_S):
            grammar = await asyncio.to_thread(grammar_of, kind, value)
            grammar = grammar if before is None else behind(before, grammar)
            # A timeout must not cancel a compilation that others wait for.
            await asyncio.shield(asyncio.wrap_future(compiler.compile(grammar)))
    except GrammarError as error:
        raise ApiError(400, f"{field}: {error}", param=field, code="invalid_grammar") from error
    except TimeoutError as error:
        message = f"{field}: could not be compiled within {_COMPILE_S:g} s"
        raise ApiError(400, message, param=field, code="invalid_grammar") from error
    return grammar


def derived_seed(seed: int, n: int) -> int:
    """Return the seed of choice `n`: the request's own for the first, else an independent one."""
    if n == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + n.to_bytes(4, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
