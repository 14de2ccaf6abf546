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
from collections.abc import Callable
from typing import Any

import torch

from tinkercloud.core.types import SampleOutput, ServedModel
from tinkercloud.embedded.draft_training.online_trainer import DraftLoops, Following
from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.model.device import choose_device, choose_dtype, settle, usable_cores
from tinkercloud.embedded.process.drafter_setup import Asked, speculate
from tinkercloud.embedded.process.fair_share import Turns
from tinkercloud.embedded.process.model_store import ModelStore
from tinkercloud.embedded.process.protocol import (
    Call,
    EngineSettings,
    Ready,
    Result,
    StartFailed,
    Stats,
    encode_error,
    pack,
    receive,
)
from tinkercloud.embedded.process.version_cache import VersionCache
from tinkercloud.embedded.sampling.engine import SamplingEngine
from tinkercloud.embedded.training.micro_batches import Limits
from tinkercloud.embedded.training.queue import TrainingQueue
from tinkercloud.errors import ConfigError
from tinkercloud.weights.loader import read_config
from tinkercloud.weights.tokenizer import ensure_tokenizer_folder

log = logging.getLogger(__name__)


TRAINING_SLICE_S = 0.1
"""How long training may keep samples waiting, as far as its steps can be cut."""


class Worker:
    """Owns the models, the sampling engine and the device."""

    def __init__(self, settings: EngineSettings, send: Callable[[object], None]):
        self._send = send
        self._drafts = DraftLoops()
        threads = settings.threads or usable_cores()
        self._engine = SamplingEngine(
            max_batch=settings.max_batch,
            depth=settings.decode_depth,
            kv_cache_bytes=settings.kv_cache_bytes,
            num_threads=threads,
            speculate=speculate(
                Asked(
                    settings.speculate,
                    settings.speculate_trace,
                    threads,
                    settings.cache_dir,
                    settings.drafts_dir,
                    Following(settings.draft_share, settings.draft_memory_bytes),
                ),
                self._drafts,
            ),
        )
        self._settings = settings
        self._models: ModelStore | None = None
        self._limits = Limits(settings.microbatch_tokens, settings.activation_bytes)
        self._training = TrainingQueue(self._limits, self._drafts.witness)
        self._inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._turns = Turns()
        self._last_stats_s = 0.0
        self._worked_s = 0.0  # since a model made a step

    def start(self) -> tuple[ServedModel, ...]:
        """Read every model's configuration, load the default model."""
        settings = self._settings
        device = choose_device()
        dtype = choose_dtype(settings.dtype, device)
        torch.set_num_threads(settings.threads or usable_cores())
        served, loaders = [], {}
        for name, path in settings.models:
            config = read_config(path)
            tokenizer = ensure_tokenizer_folder(path, settings.cache_dir)
            served.append(
                ServedModel(
                    name, config.model_type, config.max_position_embeddings, config.vocab_size,
                    config.num_parameters, tokenizer, config.eos_token_ids,
                    str(dtype).removeprefix("torch."),
                )
            )  # fmt: skip
            loaders[name] = (path, tokenizer)

        def load(name: str) -> BaseModel:
            path, tokenizer = loaders[name]
            return BaseModel.load(name, path, tokenizer, dtype, device)

        versions = VersionCache(settings.cache_dir / "versions", settings.version_cache_bytes)
        self._models = ModelStore(load, versions, self._limits)
        self._models.base(served[0].name)
        return tuple(served)

    def run(self) -> None:
        """Until the other end is gone (None in the inbox)."""
        while True:
            idle = not self._engine.busy and not self._training
            drafts = self._drafts.are_due(idle=idle)
            if idle and not drafts:
                self._report(force=True)
            if not self._take_messages(block=idle and not drafts):
                return
            if drafts:
                self._drafts.work()
            self._work()
            self._report()

    def put(self, message: Call | None) -> None:
        """Called by the reader thread."""
        self._inbox.put(message)

    # ---- messages

    def _take_messages(self, *, block: bool) -> bool:
        while True:
            try:
                call = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if call is None:
                return False
            self._handle(call)
            block = False

    def _handle(self, call: Call) -> None:
        assert self._models is not None
        try:
            if call.method == "sample":
                version, request = call.args
                self._engine.submit(self._models.version(version), request, self._replier(call.id))
                return
            if call.method == "forward_backward":
                model_id, batch = call.args
                self._training.add(call.id, self._models.model(model_id), batch)
                return
            if call.method == "release":
                self._engine.forget(*call.args)
            value = getattr(self._models, call.method)(*call.args)
            if call.method == "optim_step":
                self._stepped(call.args[0])
        except Exception as error:  # noqa: BLE001 - every call is answered, whatever went wrong
            self._answer_error(call.id, error)
        else:
            self._send(Result(call.id, value))

    def _replier(self, call_id: int) -> Callable[[SampleOutput | BaseException], None]:
        def reply(outcome: SampleOutput | BaseException) -> None:
            if isinstance(outcome, BaseException):
                self._answer_error(call_id, outcome)
            else:
                self._send(Result(call_id, outcome))

        return reply

    def _answer_error(self, call_id: int, error: BaseException) -> None:
        name, text = encode_error(error)
        if name == "TinkercloudError":
            log.error("call %s failed", call_id, exc_info=error)
        self._send(Result(call_id, error=(name, text)))

    # ---- work

    def _stepped(self, model_id: str) -> None:
        """A model has made its step: drafts may take a share of the time that it took."""
        assert self._models is not None
        self._drafts.stepped(self._models.model(model_id).base, self._worked_s)
        self._worked_s = 0.0

    def _work(self) -> None:
        """One step of sampling, or a slice of training."""
        began = time.monotonic()
        waiting = {"samples_wait": self._engine.busy, "training_waits": bool(self._training)}
        samples = self._turns.is_for_samples(**waiting)
        if samples:
            self._sample_once()
        elif self._training:
            self._train_a_little()
        both = all(waiting.values()) and self._engine.busy and bool(self._training)
        took_s = time.monotonic() - began
        self._worked_s += took_s
        self._turns.took(took_s, samples=samples, both_wait=both)

    def _sample_once(self) -> None:
        try:
            self._engine.step()
        except Exception as error:
            log.exception("a sampling step failed")
            self._engine.fail_all(error)

    def _train_a_little(self) -> None:
        for done in self._training.step(TRAINING_SLICE_S):
            if done.error is not None:
                self._answer_error(done.call_id, done.error)
            else:
                self._send(Result(done.call_id, done.output))

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._last_stats_s < 1.0:
            return
        self._last_stats_s = now
        assert self._models is not None
        self._drafts.look(now, idle=force)
        self._send(
            Stats(
                {
                    "sampling_running": self._engine.num_running,
                    "sampling_waiting": self._engine.num_waiting,
                    "training_waiting": len(self._training),
                    "tokens_sampled": self._engine.num_tokens_sampled,
                    **self._models.counts(),
                },
                *self._speculation(),
            )
        )

    def _speculation(self) -> tuple[dict[str, Any], list[str]]:
        told, lines = self._engine.speculation()
        for name, of_draft in self._drafts.snapshot().items():
            told[name]["following"] = of_draft
        return told, lines


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
        log.warning("lost the server process")
    worker.put(None)
    # The worker may be deep in a computation whose result nobody will read.
    time.sleep(3.0)
    os._exit(0)


def main(fd: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    # Ctrl-C reaches the whole process group; the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    settings = receive(sock)
    if not isinstance(settings, EngineSettings):
        return
    outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    worker = Worker(settings, outbox.put)
    try:
        served = worker.start()
    except (ConfigError, OSError) as error:
        sock.sendall(pack(StartFailed(str(error))))
        return
    settle()
    threading.Thread(target=_writer, args=(sock, outbox), name="writer", daemon=True).start()
    outbox.put(Ready(served))
    threading.Thread(target=_reader, args=(sock, worker), name="reader", daemon=True).start()
    worker.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
