"""vLLM's real scheduler, configured as the server configures it, with a model that makes up its tokens in no time.

Used by the tests here and by ``benchmarks/vllm_cost.py``.
"""

from __future__ import annotations

import copy
from collections import deque
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
NAME = "loadbox.engines.vllm.MailboxScheduler"


def make_config(model: Path, *, asynchronous: bool, seqs: int = 16, blocks: int = 65, policy: str = "fcfs") -> Any:
    """A ``VllmConfig`` as ``vllm serve`` makes it for a model on the CPU."""
    config = EngineArgs(
        model=str(model), dtype="float32", max_model_len=1024, max_num_seqs=seqs, max_num_batched_tokens=256, block_size=BLOCK,
        enable_prefix_caching=True, enforce_eager=True, scheduling_policy=policy,
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = asynchronous  # the CPU platform has turned it off; nothing here needs what it lacks
    return config


def rank_config(config: Any, rank: int = 0, scheduler: str | None = NAME, **additional: object) -> Any:
    """The configuration as a rank of a dense model gets it."""
    config = copy.copy(config)
    config.additional_config = additional
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.data_parallel_index = rank
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.scheduler_cls = scheduler
    return config


def make_scheduler(config: Any, *, blocks: int | None = None) -> Any:
    """The scheduler, by the way that vLLM's engine core takes; without KV cache if ``blocks`` is 1."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [] if blocks == 1 else [KVCacheGroupSpec(["layer"], spec)]
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks or config.cache_config.num_gpu_blocks, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        include_finished_set=False,
        log_stats=True,
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def truth(scheduler: Any) -> tuple[int, int, int, int]:
    """The load, counted one by one."""
    blocks = [block for block in scheduler.kv_cache_manager.block_pool.blocks if not block.is_null]
    waiting = sum(1 for _ in scheduler.waiting) + sum(1 for _ in scheduler.kv_holding_waiting)
    return len(scheduler.running), waiting, sum(block.ref_cnt > 0 for block in blocks), len(blocks)


class Rig:
    """An engine's step: schedule, make up tokens, apply; with async scheduling a batch is scheduled before the last is applied."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.depth = 2 if scheduler.scheduler_config.async_scheduling else 1
        self.preempted = 0
        self.cached = 0
        self._flying: deque[tuple[Any, ModelRunnerOutput]] = deque()
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK, hash_fn)

    def request(self, name: str, prompt: list[int], max_tokens: int, priority: int = 0) -> Request:
        """A request that ends after ``max_tokens`` and not before."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        return Request(name, prompt, sampling, None, priority=priority, block_hasher=self._hasher)

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def schedule(self) -> bool:
        """Schedule a batch, if there is room for one in flight."""
        scheduler = self.scheduler
        if len(self._flying) >= self.depth or not scheduler.has_requests():
            return False
        output = scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        self._flying.append((output, self.make_up(output)))
        return True

    def make_up(self, output: Any) -> ModelRunnerOutput:
        """What a model would have made of a batch, to be called right after it has been scheduled."""
        names = list(output.num_scheduled_tokens)
        tokens = [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names]
        return ModelRunnerOutput(names, {name: n for n, name in enumerate(names)}, tokens)

    def apply(self) -> bool:
        """Apply the oldest batch in flight, if no more can be scheduled before."""
        if not self._flying:
            return False
        for outputs in self.scheduler.update_from_output(*self._flying.popleft()).values():
            stats = outputs.scheduler_stats
            self.cached += stats.prefix_cache_stats.hits if stats and stats.prefix_cache_stats else 0
        return True
