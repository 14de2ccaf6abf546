"""`tinkercloud target-worker`: a model that verifies drafts of clients on other machines."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from tinkercloud import logs
from tinkercloud.commands.listening import Listening, add_listening_options
from tinkercloud.commands.options import Arguments, add_settings, config_of, say
from tinkercloud.errors import ConfigError, ContextLengthExceeded
from tinkercloud.fingerprints import tensors_sha256

if TYPE_CHECKING:
    from tinkercloud.config import Config
    from tinkercloud.core.types import SampleOutput, SampleRequest
    from tinkercloud.embedded.model.base_model import BaseModel
    from tinkercloud.embedded.model.version import Version
    from tinkercloud.embedded.sampling.engine import SamplingEngine
    from tinkercloud.embedded.sampling.sequences import Job
    from tinkercloud.speculative.remote.target_messages import TargetModel

SETTINGS = (
    *("data_dir", "dtype", "engine.threads", "engine.max_batch", "engine.kv_cache_bytes"),
    *("log_level", "log_format"),
)
LISTEN = "127.0.0.1:8730"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="a Hugging Face folder or GGUF file"
    )
    parser.add_argument(
        "--weights", help="an adapter's or checkpoint's folder, or tinker://..., over the model"
    )
    add_listening_options(parser, LISTEN)
    parser.add_argument(
        "--sessions", type=int, default=256, help="of all clients that are kept at a time [256]"
    )
    parser.add_argument(
        "--idle-s", type=float, default=600.0, help="after which a session is forgotten [600]"
    )
    add_settings(parser, SETTINGS)
    parser.set_defaults(run=run)


def run(arguments: Arguments) -> int:
    from tinkercloud.commands.saved_weights import weights_folder
    from tinkercloud.speculative.remote.methods import VERIFY
    from tinkercloud.speculative.remote.target_worker import TargetLimits, TargetWorker

    config = config_of(arguments)
    logs.configure(config.log_level, config.log_format)
    listening = Listening.of(arguments)
    path = Path(arguments["model"])
    base, weights = _base(config, path), arguments["weights"]
    folder = None if weights is None else weights_folder(config.data_dir, weights)
    limits = TargetLimits(arguments["sessions"], arguments["idle_s"])
    engine = _engine(config, _version(base, path, folder))
    worker = TargetWorker(_described(config, base, path, folder), engine, limits)
    say(f"verifying with {base.name}" + ("" if weights is None else f" and {weights}"))
    listening.serve(worker, VERIFY, "generate --target HOST:{port}")
    return 0


@dataclass(frozen=True, slots=True)
class TargetEngine:
    """A sampling engine with one version."""

    version: "Version"
    engine: "SamplingEngine"

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def submit(
        self, request: "SampleRequest", reply: "Callable[[SampleOutput | BaseException], None]"
    ) -> "Job":
        """Raises ContextLengthExceeded."""
        longest = self.version.base.config.max_position_embeddings
        num_tokens = len(request.prompt) + (request.params.max_tokens or 0)
        if num_tokens > longest:
            raise ContextLengthExceeded(f"{num_tokens} tokens; the model reads {longest}")
        return self.engine.submit(self.version, request, reply)

    def cancel(self, job: "Job") -> None:
        self.engine.cancel(job)

    def step(self) -> None:
        self.engine.step()

    def fail_all(self, error: BaseException) -> None:
        self.engine.fail_all(error)


def _base(config: "Config", path: Path) -> "BaseModel":
    """Raises ConfigError."""
    from tinkercloud.commands.bench import load_base
    from tinkercloud.embedded.model.device import set_up_torch, usable_cores

    if not path.exists():
        raise ConfigError(f"--model {path}: there is no such file or folder")
    set_up_torch(config.engine.threads or usable_cores())
    return load_base(path.stem if path.is_file() else path.name, path, config)


def _version(base: "BaseModel", path: Path, folder: Path | None) -> "Version":
    """Raises UserError."""
    from tinkercloud.commands.saved_weights import with_weights
    from tinkercloud.embedded.model.version import Version

    if folder is None:
        return Version("target", base, base.weights, None, 1.0)
    return with_weights(base, folder, path)


def _described(
    config: "Config", base: "BaseModel", path: Path, folder: Path | None
) -> "TargetModel":
    """folder: of the weights over the model's."""
    from tinkercloud.speculative.remote.target_messages import TargetModel, tokenizer_files
    from tinkercloud.weights.tokenizer import ensure_tokenizer_folder, vocabulary_digest

    # Of the weights too: a session goes on at a worker that came back, by them alone.
    over = "" if folder is None else tensors_sha256(folder, with_optimizer=False)
    identity = f"{base.name} {base.config} {tensors_sha256(path)} {over}"
    digest = sha256(identity.encode()).digest()
    tokenizer = ensure_tokenizer_folder(path, config.data_dir / "cache")
    if base.decoder is None or tokenizer is None:
        return TargetModel(base.name, digest, base.config.vocab_size)
    vocabulary = vocabulary_digest(base.decoder)
    files = tokenizer_files(tokenizer)
    return TargetModel(base.name, digest, base.config.vocab_size, vocabulary, files)


def _engine(config: "Config", version: "Version") -> TargetEngine:
    from tinkercloud.embedded.model.device import freeze_garbage_collector, usable_cores
    from tinkercloud.embedded.sampling.engine import SamplingEngine

    freeze_garbage_collector()
    engine = SamplingEngine(
        max_batch=config.engine.max_batch,
        kv_cache_bytes=config.engine.kv_cache_bytes,
        num_threads=config.engine.threads or usable_cores(),
    )
    return TargetEngine(version, engine)
