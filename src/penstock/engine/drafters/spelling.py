"""Conversion of a text between the vocabularies of a target and of a drafter.

    the target's tokens  | The| quick| bro|wn| f|ox|            accepted or not, one by one
    the text               The quick brown fox   jumps over t
    the drafter's        | The| qu|ick| brown| fox| jump|s| over| t|
                         |-------- read ---------|---- drafted ----|

New text is tokenized together with the drafter's last few tokens, as a word's tokens depend on its
continuation. A draft is tokenized as the target would tokenize the whole text, if that has a
boundary at the target's last token. Errors cost acceptance only: drafts are verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.tokenizer import Tokenizer

TAIL = 8
"""Tokens before new text that are tokenized again with it, and as many as context before."""
RECENT = 32
"""Last tokens of the target by which the language of a text is judged."""
_MOST_OWN = 1.75
"""Most tokens of a drafter per target token in a language that its tokenizer supports. Measured:
SmolLM2 has up to 1.5 per token of Qwen in code and English, and at least 2.2 in Chinese, Japanese,
Korean and Russian."""


class Vocabularies:
    """The tokenizers of a target and of a drafter.

    target_ends, own_ends: ids of the tokens that end a text or a turn

    Special tokens map to those of equal spelling, and ends to ends; others are not read.
    """

    def __init__(
        self,
        target: Tokenizer,
        own: Tokenizer,
        target_ends: Sequence[int],
        own_ends: Sequence[int],
    ) -> None:
        self.target = target
        self.own = own
        self.own_of_special = _alike(target, own, target_ends, own_ends)
        self.target_of_special = _alike(own, target, own_ends, target_ends)
        self.opening = opening(own)
        """Tokens at the start of the drafter's texts."""

    def is_made_for(self, token_ids: Sequence[int]) -> bool:
        """True if the drafter's tokenizer supports the language of the target's last tokens."""
        recent = [t for t in token_ids if not self.target.is_special(t)]
        own = self.own.encode(self.target.decode(recent), add_special_tokens=False)
        return len(own) <= _MOST_OWN * max(1, len(recent)) + 1


def _alike(
    vocabulary: Tokenizer, other: Tokenizer, ends: Sequence[int], other_ends: Sequence[int]
) -> dict[int, int]:
    """Map special tokens of a vocabulary to equivalent ones of the other."""
    ids = {spelling: token for token, spelling in other.special_tokens.items()}
    found = dict.fromkeys(ends, other_ends[0]) if other_ends else {}
    return found | {t: ids[s] for t, s in vocabulary.special_tokens.items() if s in ids}


def opening(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that a tokenizer puts before a text."""
    whole, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return whole[: next((i for i in range(len(whole)) if whole[i:][: len(bare)] == bare), 0)]


class OwnText:
    """A text of the target in the drafter's `token_ids`."""

    def __init__(self, vocabularies: Vocabularies) -> None:
        self.token_ids = list(vocabularies.opening)
        self.num_read = 0
        """Tokens of the target."""
        self._vocabularies = vocabularies
        self._run = len(self.token_ids)
        """Index after the last special token."""
        self._last: list[int] = []
        """The target's last tokens after its last special one."""
        self._stream = vocabularies.target.detokenizer(skip_special_tokens=False)

    def copy(self) -> OwnText:
        """Return an independent copy."""
        other = OwnText(self._vocabularies)
        other.token_ids, other.num_read = self.token_ids[:], self.num_read
        other._run, other._last = self._run, self._last[:]
        other._stream = self._stream.copy()
        return other

    def read(self, token_ids: Sequence[int]) -> int:
        """Append tokens of the target; return how many of the drafter's tokens are unchanged."""
        target, text, same = self._vocabularies.target, "", len(self.token_ids)
        for token in token_ids:
            if target.is_special(token) or token in self._vocabularies.own_of_special:
                same = min(same, self._go_on(text + self._stream.finish()))
                self._go_on_special(token)
                text = ""
            else:
                text += self._stream.add(token)
                self._last = [*self._last[1 - TAIL :], token]
        self.num_read += len(token_ids)
        return min(same, self._go_on(text))

    def num_own(self, num_tokens: int) -> int:
        """Estimate the drafter's tokens for `num_tokens` of the target, plus one to drop."""
        return -(-num_tokens * len(self.token_ids) // max(1, self.num_read)) + 1

    def respelt(self, drafted: Sequence[int]) -> list[int]:
        """Return the drafter's tokens after the text as tokens of the target.

        Empty if the text ends inside a character, or if a token would span its end."""
        target, own = self._vocabularies.target, self._vocabularies.own
        meanings = self._vocabularies.target_of_special
        if self._stream.is_amid_character:
            return []
        stream, text, end = own.detokenizer(False, self.token_ids[-1]), "", None
        for token in drafted:
            if own.is_special(token) or token in meanings:
                end = token
                break
            text += stream.add(token)
        tokens = target.encode_behind(self._last, text) if text else []
        if tokens is None:
            return []
        if end is None:
            # The last token may depend on the following text.
            return tokens[:-1]
        return [*tokens, meanings[end]] if end in meanings else tokens

    def num_covering(self, token_ids: Sequence[int]) -> int:
        """Return the number of the drafter's tokens that cover the target's last tokens."""
        own, ids = self._vocabularies.own, self.token_ids
        num_bytes, begin = len(self._vocabularies.target.bytes_of(token_ids)), len(ids)
        while num_bytes > 0 and begin > self._run:
            begin -= 1
            num_bytes -= len(own.token_bytes(ids[begin], ids[begin - 1] if begin else None))
        return len(ids) - begin

    def compare(self, token_ids: Sequence[int], guesses: Sequence[int]) -> tuple[int, int]:
        """Return how many of the target's last tokens were evaluated, and how many predicted.

        A token is predicted if all of the drafter's tokens that share a byte with it are.

        guesses: predictions of the drafter's last tokens
        """
        target, own = self._vocabularies.target, self._vocabularies.own
        if self._stream.is_amid_character or not guesses:
            return 0, 0
        first = len(self.token_ids) - len(guesses)
        is_right: list[bool] = []
        for i, guess in enumerate(guesses, first):
            token = self.token_ids[i]
            size = len(own.token_bytes(token, self.token_ids[i - 1] if i else None))
            is_right += [guess == token] * size
        num, num_right, end = 0, 0, len(is_right)
        for i in range(len(token_ids) - 1, -1, -1):
            before = token_ids[i - 1] if i else None
            begin = end - len(target.token_bytes(token_ids[i], before))
            if begin < 0 or target.is_special(token_ids[i]):
                break
            num, num_right = num + 1, num_right + all(is_right[begin:end])
            end = begin
        return num, num_right

    def _go_on_special(self, token: int) -> None:
        self._last = []
        own = self._vocabularies.own_of_special.get(token)
        if own is None or self.token_ids == self._vocabularies.opening == [own]:
            return
        self.token_ids.append(own)
        self._run = len(self.token_ids)

    def _go_on(self, text: str) -> int:
        ids, run, own = self.token_ids, self._run, self._vocabularies.own
        if not text:
            return len(ids)
        tail = max(run, len(ids) - TAIL)
        while tail > run and _goes_on(own.token_bytes(ids[tail], ids[tail - 1])):
            tail -= 1
        before = ids[max(run, tail - TAIL) : tail]
        end = own.bytes_of(ids[tail:], before[-1] if before else None).decode(errors="replace")
        anew = own.encode_behind(before, end + text)
        if anew is None:
            tail, anew = len(ids), own.encode(text, add_special_tokens=False)
        ids[tail:] = anew
        return tail


def _goes_on(piece: bytes) -> bool:
    """True if a token starts inside a UTF-8 character."""
    return piece[:1] >= b"\x80" and piece[:1] < b"\xc0"
