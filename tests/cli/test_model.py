"""The scheduler model: pages are conserved, budgets kept, everything accepted ends."""

from __future__ import annotations

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from loadbox.cli.demo._model import Iteration, ModelConfig, Scheduler


def pages(config: ModelConfig, tokens: int) -> int:
    return -(-tokens // config.page_tokens)


def check(scheduler: Scheduler, iteration: Iteration) -> None:
    config = scheduler.config
    assert scheduler.free_pages + sum(sequence.pages for sequence in scheduler.running) == config.kv_pages
    assert scheduler.free_pages >= 0
    assert all(sequence.pages == 0 for sequence in scheduler.waiting)
    assert len(scheduler.running) <= config.max_running
    tokens = [n for _, n in iteration.work]
    assert min(tokens) >= 1
    assert sum(tokens) == iteration.prefill_tokens + iteration.decode_seqs <= config.token_budget
    for sequence, n in iteration.work:
        assert sequence in scheduler.running
        assert sequence.pages >= pages(config, sequence.computed + n)
    spent = iteration.prefill_tokens * config.prefill_token_s + iteration.decode_seqs * config.decode_seq_s
    assert abs(iteration.seconds - config.base_s - spent) < 1e-12


configs = st.builds(
    ModelConfig,
    token_budget=st.integers(1, 48),
    max_running=st.integers(1, 6),
    page_tokens=st.integers(1, 16),
    kv_pages=st.integers(1, 24),
)
requests = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 80), st.integers(1, 20)), min_size=1, max_size=10)


@settings(max_examples=150, deadline=None)
@given(configs, requests)
def test_everything_accepted_ends_and_pages_are_conserved(config: ModelConfig, arrivals: list[tuple[int, int, int]]) -> None:
    scheduler = Scheduler(config)
    arrivals = sorted(arrivals)
    expected: dict[int, int] = {}
    tokens: dict[int, int] = {}
    ended: set[int] = set()
    bound = sum(prompt + output for _, prompt, output in arrivals) + max(start for start, _, _ in arrivals) + 1
    next_arrival = 0
    for step in count():
        assert step <= bound, "the oldest sequence gets at least one token in every iteration, so this must have ended"
        while next_arrival < len(arrivals) and arrivals[next_arrival][0] <= step:
            _, prompt, output = arrivals[next_arrival]
            accepted = scheduler.add(next_arrival, prompt, output)
            assert accepted == (pages(config, prompt + output) <= config.kv_pages)
            if accepted:
                expected[next_arrival] = output
            next_arrival += 1
        iteration = scheduler.schedule()
        if iteration is None:
            assert not scheduler.has_work
            if next_arrival == len(arrivals):
                break
            continue
        check(scheduler, iteration)
        applied = scheduler.apply(iteration)
        for rid, finished in zip(applied.rids, applied.finished, strict=True):
            assert rid not in ended
            tokens[rid] = tokens.get(rid, 0) + 1
            if finished:
                ended.add(rid)
        assert scheduler.load()[:2] == (len(scheduler.running), len(scheduler.waiting))
        assert sum(sequence.pages for sequence in scheduler.running) == scheduler.load()[2]
    assert tokens == expected
    assert ended == set(expected)
    assert scheduler.load() == (0, 0, 0, config.kv_pages)


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    scheduler = Scheduler(ModelConfig(token_budget=10, page_tokens=1, kv_pages=100))
    scheduler.add(1, 4, 9)
    first = scheduler.schedule()
    assert first is not None
    scheduler.apply(first)
    scheduler.add(2, 23, 1)
    chunks = []
    while 2 in [sequence.rid for sequence in [*scheduler.running, *scheduler.waiting]]:
        iteration = scheduler.schedule()
        assert iteration is not None
        assert iteration.decode_seqs == 1, "the first request goes on decoding"
        chunks.append(iteration.prefill_tokens)
        applied = scheduler.apply(iteration)
        assert (2 in applied.rids) == (sum(chunks) == 23), "the first token comes with the last chunk"
    assert chunks == [9, 9, 5]


def test_time_grows_with_prefill_tokens_and_with_decoding_sequences() -> None:
    def seconds(requests: int, prompt: int, iterations: int) -> float:
        scheduler = Scheduler(ModelConfig())
        for rid in range(requests):
            scheduler.add(rid, prompt, 10)
        for _ in range(iterations):
            iteration = scheduler.schedule()
            assert iteration is not None
            scheduler.apply(iteration)
        return iteration.seconds

    assert seconds(1, 10, 1) < seconds(1, 400, 1)
    assert seconds(1, 10, 2) < seconds(20, 10, 2)


def test_without_pages_the_youngest_is_preempted_and_computed_again() -> None:
    scheduler = Scheduler(ModelConfig(token_budget=100, page_tokens=4, kv_pages=5))
    scheduler.add(1, 8, 9)  # 2 pages, soon 3, at last 4
    scheduler.add(2, 8, 3)  # 2 pages, soon 3: one too many
    first = scheduler.schedule()
    assert first is not None
    scheduler.apply(first)
    assert scheduler.load() == (2, 0, 4, 5)
    second = scheduler.schedule()
    assert second is not None
    assert scheduler.preemptions == 1
    assert [sequence.rid for sequence, _ in second.work] == [1], "nothing new starts in an iteration that preempted"
    assert scheduler.load() == (1, 1, 3, 5)
    order = []
    iteration: Iteration | None = second
    while iteration is not None:
        applied = scheduler.apply(iteration)
        order += [rid for rid, finished in zip(applied.rids, applied.finished, strict=True) if finished]
        iteration = scheduler.schedule()
    assert order == [1, 2]
    assert scheduler.load() == (0, 0, 0, 5)


def test_more_than_the_whole_cache_is_refused() -> None:
    scheduler = Scheduler(ModelConfig(page_tokens=16, kv_pages=4))
    assert not scheduler.add(1, 60, 5)
    assert scheduler.add(2, 60, 4)
    assert scheduler.load() == (0, 1, 0, 4)


def test_no_work_no_iteration() -> None:
    assert Scheduler(ModelConfig()).schedule() is None
