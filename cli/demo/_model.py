"""A continuous-batching scheduler, as a model: what a rank decides in each iteration and how long that iteration takes.

Pure: no clock, no socket, no process inside.  ``schedule()`` gives the next iteration, the caller lets its time pass, and
``apply()`` says what came of it.  The rules are those of the engines in the field:

* **Chunked prefill.**  An iteration computes at most ``token_budget`` tokens: one for each decoding sequence, then chunks of
  prompts, oldest first.  The iteration that computes a sequence's last known token yields its next one.
* **KV pages.**  A sequence holds ``ceil(tokens / page_tokens)`` pages while it runs.  When a running sequence needs a page and
  none is free, the youngest running one is preempted: its pages are freed, it goes back to the head of the queue and is computed
  again.  The oldest sequence always gets what it needs, so there is always progress.
* **The queue** is first come, first served, up to ``max_running`` sequences; a new one starts only if its first chunk's pages
  are free and nothing was preempted in the same iteration.
* **Time** grows with the batch: a base, so much a prefill token, so much a decoding sequence.

A request whose prompt and output can never fit into all pages is refused at once, as engines do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["Applied", "Iteration", "ModelConfig", "Scheduler"]


@dataclass(frozen=True)
class ModelConfig:
    """The scheduler's limits and the time an iteration takes.  Times are seconds of trace time.

    The defaults are round figures of the order of a mid-sized model on one accelerator: 10,000 prefill tokens a second, 15 ms for
    an iteration that decodes little, a chunk small enough to keep the time between tokens under 80 ms, 98,304 tokens of KV cache.
    """

    token_budget: int = 512
    max_running: int = 128
    page_tokens: int = 16
    kv_pages: int = 6144
    base_s: float = 0.015
    prefill_token_s: float = 100e-6
    decode_seq_s: float = 100e-6


@dataclass
class _Sequence:
    rid: int
    prompt_tokens: int
    output_tokens: int
    generated: int = 0
    computed: int = 0
    pages: int = 0

    @property
    def to_compute(self) -> int:
        """Tokens known (prompt and generated) whose KV entries are not there yet; 1 while decoding."""
        return self.prompt_tokens + self.generated - self.computed


@dataclass(frozen=True)
class Iteration:
    """What one iteration computes, and the time it takes (seconds of trace time)."""

    work: list[tuple[_Sequence, int]]
    prefill_tokens: int
    decode_seqs: int
    seconds: float


@dataclass(frozen=True)
class Applied:
    """What came of an iteration, in columns: requests that got a token, and whether that was the last one."""

    rids: list[int] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)


class Scheduler:
    """One rank's scheduler.  For one thread."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.running: list[_Sequence] = []
        self.waiting: deque[_Sequence] = deque()
        self.free_pages = config.kv_pages
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.running or self.waiting)

    def load(self) -> tuple[int, int, int, int]:
        """The four numbers of a mailbox: running, waiting, KV pages in use, KV pages in all."""
        return len(self.running), len(self.waiting), self.config.kv_pages - self.free_pages, self.config.kv_pages

    def add(self, rid: int, prompt_tokens: int, output_tokens: int) -> bool:
        """Queue a request; False if it can never fit and is refused."""
        if self._pages_for(prompt_tokens + output_tokens) > self.config.kv_pages:
            return False
        self.waiting.append(_Sequence(rid, prompt_tokens, output_tokens))
        return True

    def schedule(self) -> Iteration | None:
        """Decide the next iteration and take its pages; None if there is no work."""
        budget = self.config.token_budget
        work: list[tuple[_Sequence, int]] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            tokens = min(sequence.to_compute, budget)
            while not self._grow(sequence, tokens):
                preempted = True
                if self._preempt_youngest() is sequence:
                    break
            else:
                work.append((sequence, tokens))
                budget -= tokens
                index += 1
        while self.waiting and budget and not preempted and len(self.running) < self.config.max_running:
            sequence = self.waiting[0]
            tokens = min(sequence.to_compute, budget)
            if not self._grow(sequence, tokens):
                break
            self.running.append(self.waiting.popleft())
            work.append((sequence, tokens))
            budget -= tokens
        return self._timed(work) if work else None

    def apply(self, iteration: Iteration) -> Applied:
        """Account for an iteration that has been computed: new tokens, finished requests gone, their pages freed."""
        applied = Applied()
        for sequence, tokens in iteration.work:
            sequence.computed += tokens
            if sequence.to_compute:
                continue
            sequence.generated += 1
            done = sequence.generated >= sequence.output_tokens
            applied.rids.append(sequence.rid)
            applied.finished.append(done)
            if done:
                self._release(sequence)
        if any(applied.finished):
            self.running = [sequence for sequence in self.running if sequence.pages]
        return applied

    def _timed(self, work: list[tuple[_Sequence, int]]) -> Iteration:
        # A decoding sequence computes one token; so does a prompt's last chunk of one, at much the same price.
        decode_seqs = sum(1 for sequence, _ in work if sequence.to_compute == 1)
        prefill_tokens = sum(tokens for _, tokens in work) - decode_seqs
        config = self.config
        seconds = config.base_s + prefill_tokens * config.prefill_token_s + decode_seqs * config.decode_seq_s
        return Iteration(work, prefill_tokens, decode_seqs, seconds)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_tokens)

    def _grow(self, sequence: _Sequence, tokens: int) -> bool:
        needed = self._pages_for(sequence.computed + tokens) - sequence.pages
        if needed > self.free_pages:
            return False
        self.free_pages -= needed
        sequence.pages += needed
        return True

    def _preempt_youngest(self) -> _Sequence:
        sequence = self.running.pop()
        self._release(sequence)
        self.preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence

    def _release(self, sequence: _Sequence) -> None:
        self.free_pages += sequence.pages
        sequence.pages = sequence.computed = 0
