"""Requests whose grammars are compiled, in threads beside the engine's steps."""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from tinkercloud.embedded.model.base_model import BaseModel
from tinkercloud.embedded.sampling.sequences import Job
from tinkercloud.errors import UserError
from tinkercloud.grammar.compiler import CompiledGrammar, GrammarCompiler

COMPILE_LIMIT_S = 10.0
MAX_COMPILING = 64
"""Requests at a time: each holds a text of up to 64 Ki characters."""
_COMPILE_THREADS, _MASK_THREADS = 2, 2
_WAIT_S = 0.002  # of an engine that has nothing else to do


@dataclass(frozen=True, slots=True)
class _Compiling:
    job: Job
    future: Future[CompiledGrammar]
    deadline_s: float


class GrammarQueue:
    """Compiles for jobs, and hands each on with its grammar. on_ready: takes such a job."""

    def __init__(self, on_ready: Callable[[Job], None]):
        self._on_ready = on_ready
        self._jobs: list[_Compiling] = []
        self._compilers: dict[int, GrammarCompiler] = {}  # by base
        self._threads: ThreadPoolExecutor | None = None
        self._mask_threads: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Raises UserError when too many are compiled."""
        grammar = job.request.grammar
        assert grammar is not None
        if len(self._jobs) >= MAX_COMPILING:
            raise UserError("too many grammars are being compiled; send the request again later")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_COMPILE_THREADS, "grammar")
            self._mask_threads = ThreadPoolExecutor(_MASK_THREADS, "grammar-mask")
        base = job.version.base
        future = self._threads.submit(lambda: self._compiler_of(base).compile(grammar))
        deadline_s = time.monotonic() + COMPILE_LIMIT_S
        self._jobs.append(_Compiling(job, future, deadline_s))

    def poll(self, *, is_idle: bool) -> None:
        """Hand on what is compiled, and fail what cannot be. is_idle: wait for a moment."""
        if is_idle and self._jobs:
            wait([each.future for each in self._jobs], _WAIT_S, FIRST_COMPLETED)
        now = time.monotonic()
        done = [each for each in self._jobs if each.future.done() or now > each.deadline_s]
        for each in done:
            self._jobs.remove(each)
            self._settle(each)

    def drop(self, job: Job) -> None:
        """Nobody waits for it any more."""
        for each in [each for each in self._jobs if each.job is job]:
            each.future.cancel()
            self._jobs.remove(each)

    def clear(self) -> list[Job]:
        """Drop all jobs; returns them."""
        jobs = [each.job for each in self._jobs]
        for job in jobs:
            self.drop(job)
        return jobs

    def _settle(self, compiling: _Compiling) -> None:
        job, future = compiling.job, compiling.future
        if not future.done():
            future.cancel()
            job.fail(UserError(f"the grammar was not compiled within {COMPILE_LIMIT_S:g} s"))
            return
        error = future.exception()
        if error is not None:
            job.fail(error)
            return
        compiled, threads = future.result(), self._mask_threads
        assert threads is not None
        job.begin_grammar = lambda: compiled.begin(threads)
        self._on_ready(job)

    def _compiler_of(self, base: BaseModel) -> GrammarCompiler:
        """In a thread; two that come here together both make one, which is no more than work."""
        compiler = self._compilers.get(id(base))
        if compiler is None:
            if base.decoder is None:
                raise UserError(f"{base.name} has no tokenizer.json, which grammars need")
            eos = base.config.eos_token_ids
            compiler = GrammarCompiler(base.decoder.to_str(), base.config.vocab_size, eos)
            self._compilers[id(base)] = compiler
        return compiler
