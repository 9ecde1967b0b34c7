"""A scheduler for vLLM that leaves its load in the rank's mailbox: ``--scheduler-cls loadbox.engines.vllm.MailboxScheduler``.

It is vLLM's own scheduler with a publish after everything that changes its counts; nothing of vLLM is patched.  Written against
vLLM 0.32.  Where another version keeps its counts elsewhere, the mailbox says that there is no snapshot, and vLLM serves on.

Publishing after scheduling *and* after the outputs have been applied is deliberate: between them lies the whole forward pass, and
what was scheduled is true for all of it.  An idle scheduler is not called at all, and needs not be: the call that finished the last
request has published the zeros.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from loadbox.engines._publisher import LoadPublisher

__all__ = ["MailboxScheduler"]

_LOG_INTERVAL_S = 60.0
_log = logging.getLogger("loadbox")
_classes: dict[type, type] = {}


class MailboxScheduler(Scheduler):  # type: ignore[misc] # vLLM is not there when types are checked
    """vLLM's scheduler, publishing its load: running and waiting requests, KV blocks in use and in all.

    The one name serves every configuration: making one gives a subclass of it and of the class that vLLM would have taken by itself
    (``AsyncScheduler`` where ``scheduler_config.async_scheduling`` is on).  For a scheduler of your own, which is a subclass of
    vLLM's: ``class Mine(MailboxScheduler, MyScheduler): pass``.

    * The group is ``loadbox_group`` of ``--additional-config``, else the variable ``LOADBOX_GROUP``, else the server's
      ``instance_id``, in which a frontend finds it with ``list_groups()``.  Ranks that are servers of their own (external load
      balancing) have an instance id each: give those a group.
    * The file's mode is ``loadbox_mode`` of ``--additional-config``, octal digits (``"0640"``: its group may read, too) or an int,
      else 0600, which this user alone reads.
    * The rank is ``parallel_config.data_parallel_index``, since ``data_parallel_rank`` is 0 in every rank of a dense model.  The
      DP size is told if vLLM tells it to the scheduler, which it does for mixtures of experts.
    * Blocks that are only kept for the prefix cache are free: vLLM takes them when it needs them.  A model without a KV cache
      has 0 of 1.

    ``loadbox.engines.publisher_stats()``, in the engine-core process, has the counters of what was published and what was dropped.

    Errors: none that loadbox causes reaches vLLM; they are logged (logger ``loadbox``) at most once a minute, and the rank has no
    mailbox (readers say ABSENT) or no snapshot (SILENT) meanwhile.
    Threads and forks: as vLLM's scheduler, which belongs to the engine core's one thread.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> MailboxScheduler:
        """An instance of the class that fits the configuration."""
        if cls is MailboxScheduler:
            cls = _class_for(kwargs["vllm_config"] if "vllm_config" in kwargs else args[0] if args else None)
        instance: MailboxScheduler = super().__new__(cls)
        return instance

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._loadbox: LoadPublisher | None = None
        self._loadbox_next_log = 0.0
        super().__init__(*args, **kwargs)
        # Bound once: super() in every iteration would be a good part of what we add to it.
        self._loadbox_schedule = super().schedule
        self._loadbox_update = super().update_from_output
        self._loadbox_publish_lengths: Callable[..., None] | None = None
        try:
            config = self.vllm_config
            rank = config.parallel_config.data_parallel_index
            self._loadbox = LoadPublisher(_group(config, rank), rank, _dp_size(config, rank), mode=_mode(config))
            if _counts_are_known(self):
                self._loadbox_publish_lengths = self._loadbox._publish_lengths
        except Exception as error:
            self._loadbox_tell("has no mailbox", error)
        self._publish_load()

    # `finally`: what raised may have changed the counts before, as reset_prefix_cache does when it preempts and then fails.

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        try:
            return super().add_request(*args, **kwargs)
        finally:
            self._publish_load()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        try:
            return self._loadbox_schedule(*args, **kwargs)
        finally:
            self._publish_load()

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        try:
            return self._loadbox_update(*args, **kwargs)
        finally:
            self._publish_load()

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        try:
            return super().finish_requests(*args, **kwargs)
        finally:
            self._publish_load()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's."""
        try:
            return super().reset_prefix_cache(*args, **kwargs)
        finally:
            self._publish_load()

    def shutdown(self) -> None:
        """As vLLM's; readers say CLOSED from here on."""
        publisher, self._loadbox = self._loadbox, None
        try:
            if publisher is not None:
                publisher.close()
        except Exception as error:
            self._loadbox_tell("cannot close its mailbox", error)
        super().shutdown()

    def _publish_load(self) -> None:
        publisher = self._loadbox
        if publisher is None:
            return
        try:
            pool = self.kv_cache_manager.block_pool
            total = pool.num_gpu_blocks - 1  # one is vLLM's own null block
            publish_lengths = self._loadbox_publish_lengths
            if publish_lengths is not None and total > 0:
                active = total - pool.free_block_queue.num_free_blocks
                publish_lengths(self.running, self.waiting, self.kv_holding_waiting, active, total)
                return
            running, waiting = self.get_request_counts()
            if total > 0:
                publisher.publish(running, waiting, total - pool.get_num_free_blocks(), total)
            else:
                publisher.publish(running, waiting, 0, 1)
        except Exception as error:
            try:
                publisher.publish(0, 0, 0, 0)  # no snapshot: what is not known must not be shown as it was last
            except Exception:
                pass
            self._loadbox_tell("publishes nothing, since its load cannot be read", error)

    def _loadbox_tell(self, what: str, error: Exception) -> None:
        if monotonic() >= self._loadbox_next_log:
            self._loadbox_next_log = monotonic() + _LOG_INTERVAL_S
            _log.warning("this vLLM rank %s, and serves on: %s: %s", what, type(error).__name__, error)


def _counts_are_known(scheduler: Any) -> bool:
    """Whether the counts are kept as in vLLM 0.32, on its common queues: then they are had without a call into its Python.

    A queue's length there is a Python function that asks the deque it is; so are the counts, and the number of free blocks.
    """
    try:
        pool = scheduler.kv_cache_manager.block_pool
        return (
            _names(type(scheduler).get_request_counts) == ("len", "running", "waiting", "kv_holding_waiting")
            and _names(type(pool).get_num_free_blocks) == ("free_block_queue", "num_free_blocks")
            and isinstance(scheduler.waiting, deque)
            and isinstance(scheduler.kv_holding_waiting, deque)
        )
    except Exception:
        return False


def _names(function: Any) -> Any:
    """What a function looks up, in order: it tells one that is as simple as was known from any other."""
    return function.__code__.co_names


def _group(config: Any, rank: int) -> str:
    """The group's name; one that was given and is no good is not mended, since frontends look for what was given."""
    given = config.additional_config.get("loadbox_group") if isinstance(config.additional_config, Mapping) else None
    given = os.environ.get("LOADBOX_GROUP") or None if given is None else given
    if given is not None:
        return given  # it may be anything that JSON has: the publisher tells what is wrong with it
    # With Ray each rank's id is the server's and this ending.
    instance = str(config.instance_id).removesuffix(f"_dp{rank}")
    return re.sub(r"[^A-Za-z0-9_-]", "_", instance)[:64]


def _mode(config: Any) -> int:
    """The file's mode; as for the group, one that is no good is not mended."""
    given = config.additional_config.get("loadbox_mode") if isinstance(config.additional_config, Mapping) else None
    if not isinstance(given, str):
        return 0o600 if given is None else given  # it may be anything, as above
    try:
        return int(given, 8)
    except ValueError:
        raise ValueError(f'loadbox_mode is {given!r}: give octal digits, such as "0640"') from None


def _dp_size(config: Any, rank: int) -> int | None:
    """The DP size, or None: ranks of a dense model are told 1, whatever it is."""
    size: int = config.parallel_config.data_parallel_size
    return size if size > max(rank, 1) else None


def _class_for(config: Any) -> type[MailboxScheduler]:
    """MailboxScheduler on the class that vLLM takes by itself with this configuration."""
    try:
        base = _own_choice(config)
        if base is Scheduler:
            return MailboxScheduler
        if base not in _classes:
            _classes[base] = type(f"Mailbox{base.__name__}", (MailboxScheduler, base), {"__module__": __name__})
        return _classes[base]
    except Exception as error:
        _log.warning("vLLM's plain scheduler is taken, since the fitting one was not found: %s: %s", type(error).__name__, error)
        return MailboxScheduler


def _own_choice(config: Any) -> type:
    asynchronous = bool(config.scheduler_config.async_scheduling)
    if getattr(config, "diffusion_config", None) is not None:
        from vllm.v1.core.sched import diffusion_scheduler

        chosen: type = diffusion_scheduler.DiffusionAsyncScheduler if asynchronous else diffusion_scheduler.DiffusionScheduler
        return chosen
    if asynchronous:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler  # type: ignore[no-any-return] # as above
    return Scheduler  # type: ignore[no-any-return] # as above
