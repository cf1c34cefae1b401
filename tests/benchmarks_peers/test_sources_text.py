"""How a drafter with another tokenizer is judged."""

from __future__ import annotations

from lab.bench.sources import Decoded, text_verdicts


def decoded(
    origin: str, source: str, seconds: float, accepted: int = 0, text: tuple[int, ...] = (1,)
) -> Decoded:
    return Decoded("chat", source, origin, 100, seconds, seconds, 50, 40, accepted, text)


def test_prompts_are_parted_by_the_share_that_is_accepted() -> None:
    verdicts = text_verdicts(
        [
            decoded("liked", "none", 4.0),
            decoded("liked", "none", 3.0),
            decoded("liked", "model", 2.0, accepted=20),
            decoded("liked", "model", 2.5, accepted=20),
            decoded("disliked", "none", 2.0),
            decoded("disliked", "model", 2.5, accepted=19, text=(2,)),
        ]
    )
    _, half, rest, slowest, control = verdicts
    assert [v.outcome for v in verdicts[:4]] == ["missed", "met", "missed", "missed"]
    assert "1 of 2 prompts, 1.50 times" in half.line()
    assert "1 of 2 prompts, 0.80 times" in rest.line()
    assert "0.800 times (chat disliked; bar 0.98), 1 of 2 prompts" in slowest.line()
    assert control.outcome == "for information"
