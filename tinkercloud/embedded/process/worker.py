"""The engine process: one thread owns the device and alternates sampling with training.

Run as `python -m tinkercloud.embedded.process.worker FD` by `embedded.process.host`. Messages come
through a reader thread into a queue and leave through a writer thread; every tensor belongs to the
worker.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tinkercloud import logs
from tinkercloud.config import force_instruction_set
from tinkercloud.core.types import FromModel
from tinkercloud.embedded.draft_training.driver import TrainingSettings
from tinkercloud.embedded.draft_training.online_trainer import (
    ONLINE_PLAN,
    QUIET_S,
    OnlineSettings,
)
from tinkercloud.embedded.draft_training.online_trainers import OnlineTrainers
from tinkercloud.embedded.fairness.recent_users import SLICE_S
from tinkercloud.embedded.model import freed_memory
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import (
    choose_device,
    freeze_garbage_collector,
    instruction_set_in_use,
    usable_cores,
)
from tinkercloud.embedded.process.drafter_setup import DrafterSettings, require_drafts, speculate
from tinkercloud.embedded.process.fair_share import FairShareScheduler
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.numerics import numerics
from tinkercloud.embedded.process.phase_memory import SAMPLING, TRAINING, PhaseMemory
from tinkercloud.embedded.process.protocol import (
    Call,
    Cancel,
    EngineSettings,
    ForwardBackward,
    Ping,
    Publish,
    Ready,
    Reply,
    Sample,
    SaveModel,
    Serves,
    StartFailed,
    Stats,
    pack,
    receive,
)
from tinkercloud.embedded.process.request_handlers import DraftHooks, RequestHandlers
from tinkercloud.embedded.process.served_models import load_default, open_models
from tinkercloud.embedded.process.token_outbox import TokenOutbox
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import TrainingQueue
from tinkercloud.errors import ConfigError
from tinkercloud.speculative.learning.schedule import TriggerSettings

logger = logging.getLogger(__name__)


class Worker:
    """Owns the models, the sampling engine and the device."""

    def __init__(
        self, settings: EngineSettings, models: ModelStore, send: Callable[[object], None]
    ):
        self._send = send
        self._models = models
        self._drafts = OnlineTrainers()
        config = settings.engine
        limits = Limits(config.microbatch_tokens, config.activation_bytes)
        self._training = TrainingQueue(limits, self._drafts.observer, models.require_pass)
        self._engine = SamplingEngine(
            max_batch=config.max_batch,
            depth=config.decode_depth,
            kv_cache_bytes=config.kv_cache_bytes,
            num_threads=config.threads or usable_cores(),
            speculate=speculate(_drafter_settings(settings), self._drafts),
        )
        self._engine.yield_to(self._training.users_lately)
        self._tokens = TokenOutbox(send)
        self._handlers = RequestHandlers(
            *(models, self._engine, self._training, self._tokens),
            DraftHooks(self._after_optim_step, self._train_draft),
        )
        self._inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._held: deque[Call | None] = deque()  # that came during long work on a model
        self._part_began_s = time.monotonic()
        self._in_work: str | None = None  # the model that the call underway works on
        models.yield_to(self._serve_others)
        self._scheduler = FairShareScheduler()
        self._memory = PhaseMemory()
        self._instruction_set = instruction_set_in_use(choose_device())
        self._last_stats_s = 0.0
        self._worked_s = 0.0  # since a model's optimizer step
        self._last_work_s = time.monotonic()  # for a client
        self._keeps_freed_memory = False

    def run(self) -> None:
        """Serve until the API process is gone (None in the inbox)."""
        while True:
            if self._is_idle:
                self._report(force=True)  # before anybody who waited for that work asks
                if not self._rest():
                    return
            elif not self._take_messages():
                return
            # Not while idle: what a client asks for next, a sample for one, would wait for that.
            samples_wait = self._engine.busy
            if (samples_wait or self._training) and self._drafts.are_due(samples_wait=samples_wait):
                self._drafts.work()
            self._work()
            self._report()

    def put(self, message: Call | None) -> None:
        """Called by the reader thread."""
        self._inbox.put(message)

    # ---- messages

    def _take_messages(self, wait_s: float | None = 0.0) -> bool:
        """Those that are there; before that, waits for one. False: there is nobody any more."""
        while True:
            try:
                call = self._next_message(wait_s)
            except queue.Empty:
                return True
            if call is None:
                return False
            self._part_began_s = time.monotonic()
            self._in_work = _model_of(call)
            self._handlers.handle(call, self._send)
            wait_s = 0.0

    def _next_message(self, wait_s: float | None) -> Call | None:
        """Raises Empty."""
        if self._held:
            return self._held.popleft()
        return self._inbox.get(block=wait_s != 0.0, timeout=wait_s or None)

    def _serve_others(self) -> None:
        """Long work on a model calls this between its parts: samples, and passes and saves of other
        models, go on meanwhile, after each slice of that work for as long as it took. Other
        requests wait, since they may make or change models; none of the samples can need one of
        these: their weights were published before."""
        part_s = time.monotonic() - self._part_began_s
        if part_s < SLICE_S:
            return
        until = time.monotonic() + part_s
        self._take_harmless()
        may_train = self._in_work not in self._training.model_ids
        while self._engine.busy or (may_train and self._training):
            if may_train:
                self._work()
            else:
                self._sample_once()
            if time.monotonic() >= until:
                break
            self._take_harmless()
        self._part_began_s = time.monotonic()

    def _take_harmless(self) -> None:
        """Samples, and passes and saves of models that neither the call underway nor one that waits
        is about."""
        while not self._inbox.empty():
            call = self._inbox.get()
            if call is not None and self._is_harmless(call):
                self._handlers.handle(call, self._send)
            else:
                self._held.append(call)

    def _is_harmless(self, call: Call) -> bool:
        if isinstance(call.request, ForwardBackward | SaveModel):
            taken = {self._in_work, *(_model_of(each) for each in self._held if each is not None)}
            return call.request.model_id not in taken
        return isinstance(call.request, Sample | Cancel | Ping)

    @property
    def _is_idle(self) -> bool:
        return not self._engine.busy and not self._training

    def _rest(self) -> bool:
        """There is nothing to do: waits for messages. In quiet time gives back the memory that
        training has freed, and trains drafts."""
        if not self._keeps_freed_memory and not self._drafts.are_due_in_quiet:
            return self._take_messages(wait_s=None)
        quiet_at_s = self._last_work_s + QUIET_S
        if not self._take_messages(wait_s=max(quiet_at_s - time.monotonic(), 0.0)):
            return False
        if time.monotonic() < quiet_at_s or not self._is_idle:
            return True
        if self._keeps_freed_memory:
            freed_memory.give_back()
            self._keeps_freed_memory = False
        while self._inbox.empty() and self._is_idle and self._drafts.are_due_in_quiet:
            self._drafts.work(quiet=True)
            self._report()
        return True

    # ---- work

    def _after_optim_step(self, base: BaseModel) -> None:
        """Draft training may take a share of the time since the step before this one."""
        self._drafts.stepped(base, self._worked_s)
        self._worked_s = 0.0

    def _train_draft(self, base_model: str) -> None:
        """The caller finds in the numbers that it is asked for."""
        self._drafts.ask(base_model)
        self._report(force=True)

    def _work(self) -> None:
        """One step of sampling, or a slice of training."""
        began = time.monotonic()
        has_samples, has_training = self._engine.busy, bool(self._training)
        samples = self._scheduler.is_for_samples(
            samples_wait=has_samples, training_waits=has_training
        )
        if samples:
            self._sample_once()
            self._memory.worked(SAMPLING)
        elif has_training:
            self._train_slice()
            self._memory.worked(TRAINING)
            self._keeps_freed_memory = True
        both = has_samples and has_training and self._engine.busy and bool(self._training)
        now = time.monotonic()
        took_s = now - began
        if has_samples or has_training:
            self._last_work_s = now
        self._worked_s += took_s
        self._scheduler.took(took_s, samples=samples, both_wait=both)

    def _sample_once(self) -> None:
        try:
            self._engine.step()
            self._tokens.flush()
        except Exception as error:  # each waiting sample gets it; training goes on
            logger.exception("a sampling step failed")
            self._engine.fail_all(error)

    def _train_slice(self) -> None:
        for call in self._training.step(SLICE_S):
            Reply(call.call_id, self._send)(call.error if call.error is not None else call.output)

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._last_stats_s < 1.0:
            return
        self._last_stats_s = now
        self._drafts.poll(now, idle=force)
        self._send(
            Stats(
                {
                    "sampling_running": self._engine.num_running,
                    "sampling_waiting": self._engine.num_waiting,
                    "sampling_preempted": self._engine.num_preempted,
                    "training_waiting": len(self._training),
                    "kv_blocks": self._engine.num_kv_blocks,
                    "kv_blocks_held": self._engine.num_kv_blocks_held,
                    **self._memory.stats(),
                    "tokens_sampled": self._engine.num_tokens_sampled,
                    "instruction_set": self._instruction_set,
                    **self._models.counts(),
                },
                *self._speculation(),
            )
        )

    def _speculation(self) -> tuple[dict[str, Any], list[str]]:
        snapshots, lines = self._engine.speculation()
        for name, snapshot in self._drafts.snapshot().items():
            snapshots[name]["following"] = snapshot
        return snapshots, lines + self._drafts.lines() if lines else lines


def _model_of(call: Call) -> str | None:
    """That it changes or reads; None: it is about none."""
    request = call.request
    if isinstance(request, Publish):
        return request.source.model_id if isinstance(request.source, FromModel) else None
    return getattr(request, "model_id", None)


def _drafter_settings(settings: EngineSettings) -> DrafterSettings:
    config, draft = settings.engine, settings.draft
    trigger = TriggerSettings(goal=draft.acceptance, least_cases=draft.least_cases)
    plan = replace(ONLINE_PLAN, peak_rate=draft.rate)
    return DrafterSettings(
        name=settings.speculate,
        trace_file=settings.speculate_trace,
        num_threads=config.threads or usable_cores(),
        cache_dir=settings.cache_dir,
        drafts_dir=settings.drafts_dir,
        online=OnlineSettings(
            share=config.draft_share,
            in_quiet_time=draft.in_quiet_time,
            memory_bytes=config.draft_memory_bytes,
            training=TrainingSettings(plan, trigger),
        ),
        make_head=draft.make_head,
        max_computed=draft.tokens,
        replay_share=draft.replay_share,
        rank=draft.rank,
        remote_wait_ms=draft.remote_wait_ms,
        remote_key_file=draft.remote_key_file,
        remote_ca_file=draft.remote_ca_file,
        remote_model=draft.remote_model,
    )


def _writer(sock: socket.socket, outbox: "queue.SimpleQueue[object]") -> None:
    try:
        while True:
            sock.sendall(pack(outbox.get()))
    except OSError:
        os._exit(0)


def _reader(sock: socket.socket, worker: Worker) -> None:
    try:
        while isinstance(message := receive(sock), Call):
            worker.put(message)
    except OSError:
        logger.warning("lost the server process")
    worker.put(None)
    # The worker may be deep in a computation whose result nobody will read.
    time.sleep(3.0)
    os._exit(0)


def main(fd: int) -> None:
    # Ctrl-C reaches the whole process group; the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    settings = receive(sock)
    if not isinstance(settings, EngineSettings):
        return
    logs.configure("info", settings.log_format, "engine")
    outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    force_instruction_set(settings.engine.instruction_set)
    try:
        require_drafts(_drafter_settings(settings), settings.models)
        served, models = open_models(settings)
        worker = Worker(settings, models, outbox.put)
        sock.sendall(pack(Serves(served, numerics(served[0].dtype))))
        load_default(served[0].name, models)
    except (ConfigError, OSError) as error:
        sock.sendall(pack(StartFailed(str(error))))
        return
    freeze_garbage_collector()
    threading.Thread(target=_writer, args=(sock, outbox), name="writer", daemon=True).start()
    outbox.put(Ready())
    threading.Thread(target=_reader, args=(sock, worker), name="reader", daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
