"""An executor without a model that keeps real KV contents, and checks what it is told to read.

The toy target's next token is a hash of the prefix, so the right output of a request is known
beforehand. A KV slot holds the hash of the whole prefix up to its position. Whatever a plan reads
through its block tables is compared with the request's own prefix, when the plan begins and again
when it ends: a block that was reused, shared or rolled back wrongly cannot pass.
"""

import random
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.core.types import (
    TARGET,
    DraftOrder,
    DraftReady,
    DraftSource,
    DraftTime,
    Failure,
    FinishReason,
    GroupChange,
    GroupTokens,
    PhaseTimes,
    Replayed,
    Request,
    StepPlan,
    StepResult,
    Verdict,
    VerifyItem,
)
from penstock.engine.ends import OutputEnd

VOCAB = 40
_MASK = (1 << 64) - 1


class Corruption(AssertionError):
    """KV that is not what its reader must find, or a plan that the executor cannot carry out."""


def extend(prefix: int, token: int) -> int:
    """Hash of a prefix with one more token."""
    mixed = (prefix * 6364136223846793005 + (token + 1) * 1442695040888963407) & _MASK
    return mixed ^ (mixed >> 29)


def next_token(prefix: int) -> int:
    """What the toy target says after a prefix."""
    return (extend(prefix, 7919) >> 17) % VOCAB


class Text:
    """A request's known tokens, and the hash of every prefix: `hashes[n]` is that of n tokens."""

    def __init__(self, request: Request) -> None:
        assert request.prompt_token_ids is not None
        self.request = request
        self.tokens: list[int] = []
        self.hashes = [zlib.crc32(request.tenant.encode())]
        self.append(request.prompt_token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            self.tokens.append(token)
            self.hashes.append(extend(self.hashes[-1], token))


def target_only(request: Request) -> list[int]:
    """The output that a request must have, whatever drafts for it."""
    text = Text(request)
    start = len(text.tokens)
    for _ in range(request.max_tokens):
        text.append([next_token(text.hashes[-1])])
        if text.tokens[-1] in request.stop_token_ids:
            break
    return text.tokens[start:]


def embedding_of(request: Request) -> bytes:
    """The hash of a prompt."""
    return Text(request).hashes[-1].to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class ToyDrafter:
    """Right with probability `accuracy`; `has_kv` is False for a drafter without KV.
    `eagerness`: probability to go on at each draft position before the order's end. It breaks on
    texts longer than `max_len`, and on tokens from `vocab_size` on."""

    name: str
    accuracy: float = 0.7
    has_kv: bool = True
    eagerness: float = 1.0
    max_len: int | None = None
    vocab_size: int | None = None

    def token(self, prefix: int) -> int:
        right = next_token(prefix)
        own = random.Random(extend(prefix, zlib.crc32(self.name.encode())))
        return right if own.random() < self.accuracy else (right + own.randrange(VOCAB)) % VOCAB

    def draft(self, prefix: int, most: int) -> list[int]:
        """Up to `most` tokens after a prefix."""
        drafted: list[int] = []
        for _ in range(most):
            if random.Random(extend(prefix, 13)).random() >= self.eagerness:
                break
            drafted.append(self.token(prefix))
            prefix = extend(prefix, drafted[-1])
        return drafted

    def check(self, text: list[int], num_drafted: int) -> None:
        """All of a text is read, and of a draft all but its last token."""
        if self.max_len is not None and len(text) + max(num_drafted - 1, 0) > self.max_len:
            raise Corruption(f"{self.name}: {len(text)} tokens and {num_drafted} drafted")
        if self.vocab_size is not None and max(text) >= self.vocab_size:
            raise Corruption(f"{self.name}: a text with token {max(text)}")


@dataclass(slots=True)
class Job:
    """A plan inside a lane, with the block tables and texts as they were when it was submitted.

    rows: of the decode group, as items.
    """

    plan: StepPlan
    tables: dict[tuple[str, str], tuple[int, ...]]
    texts: dict[str, Text]
    generations: dict[str, int]
    begun: bool = False
    rows: list[VerifyItem] = field(default_factory=list)

    def orders(self) -> Iterator[DraftOrder]:
        yield from self.plan.drafts
        yield from (i.draft for i in self.plan.items if i.draft is not None)

    def reads(self) -> Iterator[tuple[str, str, int]]:
        """(request, pool, number of positions) whose KV must be there already."""
        for item in (*self.plan.items, *self.rows):
            yield item.request_id, TARGET, item.start
        for order in self.orders():
            yield order.request_id, order.drafter, order.start


@dataclass
class ToyExecutor:
    """Lanes that run their plans in order, each a queue of at most `depth` until collected.

    The test says when a plan begins (`begin`), ends (`end`) and is reported (`report`).
    """

    block_size: int
    drafters: Mapping[str, ToyDrafter] = field(default_factory=dict)
    depth: int = 1

    def __post_init__(self) -> None:
        self.lanes: dict[str, deque[Job]] = {}
        self.texts: dict[str, Text] = {}
        self.tables: dict[tuple[str, str], list[int]] = {}
        self.kv: dict[str, dict[tuple[int, int], int]] = {}
        self.held: dict[tuple[str, int, int, str], list[int]] = {}
        self.ended: list[StepResult] = []
        self.generations = dict.fromkeys(self.drafters, 0)
        self.num_accepted = 0
        self.num_rows = 0
        self.members: dict[str, None] = {}
        self._reported: list[StepResult] = []

    def ready(self, lane: str) -> bool:
        unheard = sum(r.lane == lane for r in (*self.ended, *self._reported))
        return len(self.lanes.get(lane, ())) + unheard < self.depth

    def submit(self, plan: StepPlan) -> None:
        for key in plan.released:
            self.tables.pop(key, None)
        for request_id in plan.forgotten:
            if self.texts.pop(request_id, None) is None:
                raise Corruption(f"{request_id} is forgotten, but was never announced")
        for request in plan.new_requests:
            if request.id in self.texts:
                raise Corruption(f"{request.id} is announced twice")
            self.texts[request.id] = Text(request)
        if plan.is_empty:
            return
        job = Job(plan, {}, {}, dict(self.generations))
        for item in plan.items:
            self._extend_table(job, item.request_id, TARGET, item.new_blocks)
            if item.source is DraftSource.INLINE and item.draft is None:
                raise Corruption(f"{item.request_id}: an inline draft without an order")
        for order in job.orders():
            self._extend_table(job, order.request_id, order.drafter, order.new_blocks)
        if plan.decodes is not None and plan.decodes.change is not None:
            job.rows = self._rows_of(plan.decodes.change)
            for row in job.rows:
                self._extend_table(job, row.request_id, TARGET, row.new_blocks)
        self.lanes.setdefault(plan.lane, deque()).append(job)

    def _rows_of(self, change: GroupChange) -> list[VerifyItem]:
        for request_id in change.left:
            del self.members[request_id]
        self.members.update(dict.fromkeys(change.joined))
        blocks = change.new_blocks
        rows = []
        for request_id in self.members:
            start = len(self.texts[request_id].tokens) - 1
            new = (blocks[request_id],) if request_id in blocks else ()
            rows.append(VerifyItem(request_id, 0, 0, start, 1, True, new_blocks=new))
        return rows

    def collect(self) -> list[StepResult]:
        reported, self._reported = self._reported, []
        return reported

    @property
    def jobs(self) -> list[Job]:
        return [job for lane in self.lanes.values() for job in lane]

    @property
    def is_idle(self) -> bool:
        return not self.jobs and not self.ended and not self._reported

    def begin(self, lane: str) -> None:
        """Start the lane's first plan: everything that it reads must be right."""
        job = self.lanes[lane][0]
        job.begun = True
        self._check_reads(job)

    def end(self, lane: str, failing: frozenset[str] = frozenset()) -> StepResult:
        """Finish the lane's first plan: what it reads must be right still. Items and orders of
        `failing` requests come to nothing. The result waits in `ended`."""
        if not self.lanes[lane][0].begun:
            self.begin(lane)
        job = self.lanes[lane][0]
        self._check_reads(job)
        result = self._carry_out(job, failing)
        self.lanes[lane].popleft()
        self.ended.append(result)
        return result

    def report(self, result: StepResult) -> None:
        """Hand an ended plan's result to the next `collect`."""
        self.ended.remove(result)
        self._reported.append(result)

    def run(self, lane: str) -> StepResult:
        """Begin, end and report the lane's first plan."""
        result = self.end(lane)
        self.report(result)
        return result

    def lose(self, drafter: str) -> None:
        """A drafter dies: its KV and its tables are gone, its plans fail. Drafts that it has
        handed over are still there."""
        self.generations[drafter] += 1
        self.kv.pop(drafter, None)
        self.tables = {k: t for k, t in self.tables.items() if k[1] != drafter}

    def _extend_table(self, job: Job, request_id: str, pool: str, blocks: Iterable[int]) -> None:
        if request_id not in self.texts:
            raise Corruption(f"{request_id} is in a plan, but was never announced")
        job.texts[request_id] = self.texts[request_id]
        if pool != TARGET and not self.drafters[pool].has_kv:
            return
        table = self.tables.setdefault((request_id, pool), [])
        table += blocks
        if len(set(table)) != len(table):
            raise Corruption(f"{request_id}: a {pool} block is in its table twice")
        job.tables[request_id, pool] = tuple(table)

    def _is_lost(self, job: Job, pool: str) -> bool:
        return pool != TARGET and job.generations[pool] != self.generations[pool]

    def _check_reads(self, job: Job) -> None:
        for request_id, pool, num_positions in job.reads():
            if (request_id, pool) not in job.tables or self._is_lost(job, pool):
                continue
            table, slots = job.tables[request_id, pool], self.kv.get(pool, {})
            hashes = job.texts[request_id].hashes
            for position in range(num_positions):
                at = self._slot(request_id, pool, table, position)
                if slots.get(at) != hashes[position + 1]:
                    raise Corruption(
                        f"plan {job.plan.id} on {job.plan.lane}: {pool} KV of {request_id} at "
                        f"position {position} (block {at[0]}) is not that of its prefix"
                    )

    def _slot(
        self, request_id: str, pool: str, table: tuple[int, ...], position: int
    ) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        if index >= len(table):
            raise Corruption(f"{request_id}: no {pool} block for position {position}")
        return table[index], offset

    def _write(self, job: Job, request_id: str, pool: str, start: int, tail: list[int]) -> None:
        """Write the KV of positions from `start`: known tokens, then the draft tokens `tail`."""
        text, table = job.texts[request_id], job.tables[request_id, pool]
        slots = self.kv.setdefault(pool, {})
        prefix = text.hashes[start]
        written = set()
        for position, token in enumerate(tail, start):
            at = self._slot(request_id, pool, table, position)
            written.add(at[0])
            prefix = extend(prefix, token)
            slots[at] = prefix
        self._check_private(request_id, pool, written)

    def _check_private(self, request_id: str, pool: str, blocks: set[int]) -> None:
        """Nobody else may have a block that is being written."""
        in_flight = (job.tables for job in self.jobs)
        for tables in (self.tables, *in_flight):
            for (other, other_pool), table in tables.items():
                if other_pool == pool and other != request_id and not blocks.isdisjoint(table):
                    raise Corruption(f"{request_id} writes {pool} blocks of {other}")

    def _carry_out(self, job: Job, failing: frozenset[str]) -> StepResult:
        plan = job.plan
        failures = []
        verdicts = []
        ready = []
        replays = []
        for order in plan.drafts:
            if not order.max_draft_tokens:
                replays += self._replay(job, order, failing)
                continue
            if order.request_id in failing or self._is_lost(job, order.drafter):
                failures.append(Failure(order.request_id, order.epoch, "the drafter failed"))
                continue
            key = (order.request_id, order.epoch, order.round, order.drafter)
            self.held[key] = self._draft(job, order)
            ready.append(DraftReady(*key, num_draft_tokens=len(self.held[key])))
        for item in plan.items:
            if item.request_id in failing:
                failures.append(Failure(item.request_id, item.epoch, "the target failed"))
            else:
                verdicts.append(self._verify(job, item))
        decoded = None
        if plan.decodes is not None:
            decoded = self._decode(job, failing)
        return StepResult(
            plan_id=plan.id,
            lane=plan.lane,
            started_at=plan.created_at,
            finished_at=plan.created_at,
            verdicts=tuple(verdicts),
            drafts=tuple(ready),
            replays=tuple(replays),
            failures=tuple(failures),
            phases=PhaseTimes(verify=0.002 + 1e-5 * plan.num_rows),
            draft_times=tuple(self._draft_times(job)),
            num_rows=plan.num_rows,
            decoded=decoded,
        )

    def _decode(self, job: Job, failing: frozenset[str]) -> GroupTokens:
        """What is made for requests that fail does not count."""
        self.num_rows += len(job.rows)
        made = [self._verify(job, row) for row in job.rows]
        stopped = [v.request_id for v in made if v.finish_reason is FinishReason.STOP]
        failures = {v.request_id: "the target failed" for v in made if v.request_id in failing}
        return GroupTokens([v.token_ids[0] for v in made], stopped, failures)

    def _draft_times(self, job: Job) -> Iterator[DraftTime]:
        for name in self.drafters:
            orders = [o for o in job.orders() if o.drafter == name]
            if orders:
                steps = max(o.max_draft_tokens for o in orders)
                catch_up = sum(o.num_catch_up_tokens for o in orders)
                yield DraftTime(name, len(orders), steps, catch_up, 1e-4 * steps)

    def _replay(self, job: Job, order: DraftOrder, failing: frozenset[str]) -> list[Replayed]:
        """Read, and count the guesses that are right from the order's first output token on; one
        that fails goes without an answer."""
        if order.request_id in failing or self._is_lost(job, order.drafter):
            return []
        self._draft(job, order)
        text, drafter = job.texts[order.request_id], self.drafters[order.drafter]
        known = order.start + order.num_catch_up_tokens
        first = max(order.start + 1, text.request.prompt_len)
        positions = range(first, known) if order.evaluate else ()
        right = sum(drafter.token(text.hashes[p]) == text.tokens[p] for p in positions)
        return [Replayed(order.request_id, order.epoch, order.drafter, len(positions), int(right))]

    def _draft(self, job: Job, order: DraftOrder) -> list[int]:
        text = job.texts[order.request_id]
        drafter = self.drafters[order.drafter]
        known = order.start + order.num_catch_up_tokens
        if not drafter.has_kv:
            known = len(text.tokens) + len(order.front_token_ids)
        if known > len(text.tokens) + len(order.front_token_ids):
            raise Corruption(f"{order.request_id}: a catch-up beyond what is known")
        read = [*text.tokens[: known - len(order.front_token_ids)], *order.front_token_ids]
        prefix = text.hashes[min(known, len(text.tokens))]
        for token in read[len(text.tokens) :]:
            prefix = extend(prefix, token)
        drafted = drafter.draft(prefix, order.max_draft_tokens)
        drafter.check(read, order.max_draft_tokens)
        if drafter.has_kv:
            catch_up = read[order.start : known]
            self._write(job, order.request_id, order.drafter, order.start, catch_up + drafted[:-1])
        return drafted

    def _drafts_of(self, job: Job, item: VerifyItem) -> list[int]:
        drafted: list[int] = []
        if item.draft is not None and not self._is_lost(job, item.draft.drafter):
            drafted = self._draft(job, item.draft)
        if item.source is DraftSource.HELD:
            assert item.drafter is not None
            key = (item.request_id, item.epoch, item.round, item.drafter)
            if key not in self.held:
                raise Corruption(f"{key}: no such draft is held")
            drafted = self.held.pop(key)
        drafted = [*item.token_ids, *drafted]
        if item.source is DraftSource.NONE and drafted:
            raise Corruption(f"{item.request_id}: a draft that nobody verifies")
        return drafted[: item.num_draft_tokens]

    def _verify(self, job: Job, item: VerifyItem) -> Verdict:
        text = job.texts[item.request_id]
        drafted = self._drafts_of(job, item)
        known = item.start + item.num_scheduled_tokens
        is_whole, pooling = known == len(text.tokens), text.request.pooling
        if item.samples != (is_whole and pooling is None):
            raise Corruption(f"{item.request_id}: an item up to {known} of {len(text.tokens)}")
        rows = text.tokens[item.start : known] + drafted
        self._write(job, item.request_id, TARGET, item.start, rows)
        if not item.samples:
            embedding = embedding_of(text.request) if is_whole and pooling is not None else b""
            return Verdict(item.request_id, item.epoch, item.round, embedding=embedding)
        emitted: list[int] = []
        prefix = text.hashes[-1]
        for token in drafted:
            if token != next_token(prefix):
                break
            emitted.append(token)
            prefix = extend(prefix, token)
        num_accepted = len(emitted)
        emitted.append(next_token(prefix))
        before = OutputEnd(text.request)
        before.follow(text.tokens[text.request.prompt_len :])
        end = before.follow(emitted)
        most = len(emitted) if end is None else end.num_tokens
        num_proposed = len(drafted) if end is None else min(len(drafted), most)
        num_accepted = min(num_accepted, num_proposed)
        self.num_accepted += num_accepted
        text.append(emitted[:most])
        return Verdict(
            item.request_id,
            item.epoch,
            item.round,
            token_ids=tuple(emitted[:most]),
            drafter=item.drafter if drafted else None,
            num_proposed=num_proposed,
            num_accepted=num_accepted,
            num_decided=max(0, min(num_accepted + 1, num_proposed) - item.num_looked_up),
            evidence=float(max(0, num_accepted - item.num_looked_up)),
            finish_reason=None if end is None else end.reason,
            num_behind_end=len(drafted) - num_proposed,
            num_looked_up=min(item.num_looked_up, num_proposed),
        )
