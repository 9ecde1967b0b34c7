"""What the mailbox costs vLLM's scheduler: CPU time of an iteration with and without it, side by side.

``make bench-vllm`` runs it in vLLM's environment.  Measured are, with all requests decoding:

* the scheduler alone, ``schedule`` and ``update_from_output``: the strictest measure there is;
* the engine core's step, as its loop runs it: the scheduler, the executor's calls, and what the core does with the outputs.

In both the model's output is made beforehand, so that no forward pass, which takes milliseconds, makes the ratio smaller.

One scheduler changes its class between three: vLLM's own, an empty subclass of that (the control, whose ratio says how far to
believe the other), and the adapter.  So all three work on the same objects at the same addresses.  CPython's inline caches hold one
class at a time, and an engine has no other: after each change of class they are given ``WARM`` iterations to follow, which are not
timed.  Of the CPU times of the ``TIMED`` iterations after that the lower quartile is taken, since what else runs on the machine
only ever adds to them; it is three times as steady as the median, and as the time of all together.  In a round each class has two
such turns, placed so that what grows with the requests cancels.  Ratios and differences are taken within rounds.

Where a process happens to have its objects makes a difference of its own, so several processes do this one after the other.  Told
are medians over all rounds, with intervals of 95 % (bootstrap: processes are drawn, and then rounds of theirs).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from _results import facts

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "vllm"))

BATCHES = (1, 8, 64)
# Whole blocks of 16 tokens: each turn takes as many new blocks as any other.
WARM = 96
TIMED = 64
PROMPT = 16
ORDER = ("own", "control", "mailbox", "mailbox", "control", "own")
SEQUENCE = PROMPT + len(ORDER) * (WARM + TIMED) + 16
DRAWS = 2000


class Bench:
    """An engine core with a scheduler of ours, whose model says the same again and again."""

    def __init__(self, config: Any, group: str) -> None:
        from rig import BLOCK, Rig, rank_config
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        bench = self

        class Said(Executor):
            """An executor whose model has run already; its calls are those of a real one."""

            def _init_executor(self) -> None:
                self.nothing, self.empty = Future[Any](), Future[Any]()
                self.nothing.set_result(None)
                self.empty.set_result(EMPTY_MODEL_RUNNER_OUTPUT)

            def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
                return [None]

            def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
                return self.nothing if scheduler_output.total_num_scheduled_tokens else self.empty

            def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
                if not non_block:
                    return bench.said
                done: Future[Any] = Future()
                done.set_result(bench.said)
                return done

            def check_health(self) -> None:
                pass

        class Core(EngineCore):
            def _initialize_kv_caches(self, vllm_config: Any) -> Any:
                import torch

                spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
                return KVCacheConfig(vllm_config.cache_config.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], spec)])

        self.core = Core(rank_config(config, loadbox_group=group), Said, log_stats=True)
        self.said: Any = None
        self.scheduler = self.core.scheduler
        self.rig = Rig(self.scheduler)
        adapter = type(self.scheduler)
        own = next(cls for cls in adapter.__mro__ if cls.__module__.startswith("vllm."))
        self.classes = {"own": own, "control": type("Control", (own,), {}), "mailbox": adapter}

    def refill(self, batch: int, round_: int) -> None:
        """The requests of the round before are gone, and new ones decode."""
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import RequestStatus

        scheduler, rig = self.scheduler, self.rig
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        while self.core.batch_queue:
            self.core.step_fn()
        self.requests = [rig.request(f"{round_}.{n}", [3 + n] * PROMPT, 10_000) for n in range(batch)]
        for request in self.requests:
            rig.add(request)
        while any(not request.num_output_tokens for request in self.requests):
            output = scheduler.schedule()
            scheduler.update_from_output(output, rig.make_up(output))
        names = [request.request_id for request in self.requests]
        self.said = ModelRunnerOutput(names, {name: n for n, name in enumerate(names)}, [[7]] * batch)

    def scheduler_alone(self, iterations: int) -> None:
        """Schedule, apply; no more."""
        scheduler, said = self.scheduler, self.said
        for _ in range(iterations):
            scheduler.update_from_output(scheduler.schedule(False), said)

    def core_steps(self, iterations: int) -> None:
        """What the engine core's loop does for one iteration, but for handing the outputs to its sockets' thread."""
        core = self.core
        for _ in range(iterations):
            core.post_step(core.step_fn()[1])

    def round(self, work: Callable[[int], None], batch: int, round_: int) -> dict[str, float]:
        """ns an iteration, of each class."""
        clock = time.thread_time_ns
        taken = dict.fromkeys(self.classes, 0.0)
        # Each class comes first, second and third as often as the others.
        names = list(self.classes)
        turned = {name: names[(n + round_) % len(names)] for n, name in enumerate(names)}
        self.refill(batch, round_)
        for name in map(turned.__getitem__, ORDER):
            self.scheduler.__class__ = self.classes[name]
            work(WARM)
            times = []
            for _ in range(TIMED):
                start = clock()
                work(1)
                times.append(clock() - start)
            taken[name] += sorted(times)[TIMED // 4] / 2
        self.scheduler.__class__ = self.classes["mailbox"]
        done = {request.num_output_tokens for request in self.requests}
        assert min(done) >= len(ORDER) * (WARM + TIMED) - 2, f"not every iteration was one of {batch} requests: {done}"
        return taken


Rounds = list[dict[str, float]]


def interval(processes: list[Rounds], of: Callable[[dict[str, float]], float]) -> tuple[float, float, float]:
    """The median of a figure of each round, and the bounds of its interval of confidence."""
    draw = random.Random(0)
    figures = [[of(taken) for taken in rounds] for rounds in processes]
    medians = []
    for _ in range(DRAWS):
        drawn = draw.choices(figures, k=len(figures))
        medians.append(statistics.median(figure for some in drawn for figure in draw.choices(some, k=len(some))))
    medians.sort()
    everything = [figure for some in figures for figure in some]
    return statistics.median(everything), medians[DRAWS * 25 // 1000], medians[DRAWS * 975 // 1000]


def summary(processes: list[Rounds]) -> dict[str, Any]:
    """One row of the table."""
    every = [taken for rounds in processes for taken in rounds]
    row: dict[str, Any] = {f"{name}_ns": statistics.median(taken[name] for taken in every) for name in every[0]}
    for name in ("control", "mailbox"):
        row[f"{name}_ratio"] = interval(processes, lambda taken, name=name: taken[name] / taken["own"])  # type: ignore[misc] # bound
    row["cost_ns"] = interval(processes, lambda taken: taken["mailbox"] - taken["own"])
    row["rounds"] = len(every)
    return row


def percent(ratio: tuple[float, float, float]) -> str:
    """A ratio's excess over 1."""
    median, low, high = ((value - 1) * 100 for value in ratio)
    return f"{median:+.2f} ({low:+.2f} to {high:+.2f})"


def measure(batches: list[int], rounds: int) -> dict[str, Rounds]:
    """One process' rounds, by what was measured."""
    try:
        from rig import make_config
    except ModuleNotFoundError as error:
        sys.exit(f"this benchmark needs vLLM ({error}); `make bench-vllm` installs it and runs this")
    from loadbox.cli.demo.vllm._tiny_llama import make_tiny_llama

    logging.getLogger("vllm").setLevel(logging.ERROR)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_llama(Path(folder))
        blocks = 1 + max(BATCHES) * -(-SEQUENCE // 16)
        config = make_config(Path(folder), asynchronous=False, seqs=max(BATCHES), blocks=blocks)
        for mode in ("sync", "async"):
            config.scheduler_config.async_scheduling = mode == "async"
            bench = Bench(config, f"bench-{uuid.uuid4().hex[:8]}")
            gc.collect()
            gc.freeze()
            gc.disable()
            try:
                for measured, work in (("scheduler alone", bench.scheduler_alone), ("core step", bench.core_steps)):
                    for batch in batches:
                        # Fewer of the long ones, which would take most of the time.
                        times = max(rounds // 3, 2) if batch > 8 else rounds
                        found[f"{measured},{mode},{batch}"] = [bench.round(work, batch, n) for n in range(times + 1)][1:]
                assert bench.scheduler._loadbox.dropped == 0
            finally:
                gc.enable()
                gc.unfreeze()
                bench.scheduler.shutdown()
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=6, help="one after the other [6]")
    parser.add_argument("--rounds", type=int, default=24, help="rounds a process and batch size [24]")
    parser.add_argument("--batch", type=int, action="append", help=f"only this batch size, again for more {BATCHES}")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        asked.one.write_text(json.dumps(measure(asked.batch or list(BATCHES), asked.rounds)))
        return
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for n in range(asked.processes):
            file = Path(folder, str(n))
            subprocess.run([sys.executable, *sys.argv, "--one", str(file)], check=True)
            processes.append(json.loads(file.read_text()))
            print(f"process {n + 1} of {asked.processes} done", file=sys.stderr, flush=True)
    print("CPU time of an iteration; what the mailbox adds, and the control, which is vLLM's own scheduler under another name")
    print(
        f"{'measured':<16} {'mode':<5} {'batch':>5} {'own, µs':>9}  {'mailbox, % (95 %)':<24} {'control, % (95 %)':<24} ns (95 %)"
    )
    rows = []
    for what in processes[0]:
        measured, mode, batch = what.split(",")
        row = {"measured": measured, "mode": mode, "batch": int(batch), **summary([found[what] for found in processes])}
        rows.append(row)
        own, (cost, low, high) = row["own_ns"] / 1e3, row["cost_ns"]
        ratios = f"{percent(row['mailbox_ratio']):<24} {percent(row['control_ratio']):<24}"
        print(f"{measured:<16} {mode:<5} {batch:>5} {own:>9.1f}  {ratios} {cost:.0f} ({low:.0f} to {high:.0f})")
    if asked.json:
        asked.json.write_text(json.dumps(facts(processes=len(processes), rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
