"""Base models of the cluster backend: their folders, descriptions for clients, and plans."""

import asyncio
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tinkercloud.cluster.gpus.placement import Request, num_bundles
from tinkercloud.cluster.gpus.ray_link import RayLink
from tinkercloud.cluster.pool.model_pool import PoolSettings
from tinkercloud.cluster.rollout.manager import RolloutSettings
from tinkercloud.cluster.training.miles_start import check_miles
from tinkercloud.cluster.training.rank_actors import MEGATRON_RANK, MILES_RANK, GroupSettings
from tinkercloud.cluster.weights import worker_jobs
from tinkercloud.config import ClusterConfig, Config, ModelSource, stand_ins_variables
from tinkercloud.core.types import ServedModel
from tinkercloud.errors import ConfigError, PlanRefused
from tinkercloud.planning.memory_estimate import adapter_sizes
from tinkercloud.planning.model_table import read_shape
from tinkercloud.planning.plan import ClusterShape, Plan, PlanConstraints, SglangArguments
from tinkercloud.planning.slime_builder import SlimeArgumentBuilder

Dtype = Literal["bfloat16", "float32"]
MODELS_FOLDER = Path("cluster", "models")  # restore points; a later server cannot use them
ENGINE_ENTRY = "tinkercloud.cluster.sglang.entry"
CPU_PREPARE = "tinkercloud.cluster.cpu.ranks:prepare"
# SGLang's default kernels for attention and adapters need a GPU.
CPU_OPTIONS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
    *("--lora-backend", "torch_native", "--sleep-on-idle"),
)
_SIZES = ("max_seq_len", "rollout_gpus", "tp", "pp", "cp", "ep", "dp", "rollout_tp")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """plan: for adapters of this base. served.dtype: of weights, on ranks and engines."""

    folder: Path
    hf_config: Mapping[str, Any]
    plan: Plan
    served: ServedModel

    @property
    def name(self) -> str:
        return self.served.name


class BaseModels:
    """Reads base models and plans for them. shape: of the GPUs that each model may use.

    Raises ConfigError for a trainer that is not available.
    """

    def __init__(self, config: Config, shape: ClusterShape, link: RayLink | None = None):
        if config.cluster.trainer == "miles":
            check_miles(config.cluster)
        self._config = config
        self._link = link or RayLink()
        self._builder = SlimeArgumentBuilder(shape)
        self._dtype: Dtype = weights_dtype(config)

    async def read(self, source: ModelSource) -> BaseModel:
        """Raises ConfigError for files that cannot be read, and for a model that has no plan."""
        cache_dir = self._config.data_dir / "cache"
        folder = await worker_jobs.run(
            self._link, worker_jobs.hf_folder, source.path, cache_dir, self._dtype
        )
        hf_config = await asyncio.to_thread(worker_jobs.read_json, folder / "config.json")
        try:
            plan = self.plan(hf_config, self._config.cluster.lora_rank)
        except PlanRefused as refused:
            raise ConfigError(f"{source.name}: {refused}") from refused
        served = ServedModel(
            name=source.name,
            architecture=str(hf_config.get("model_type", plan.architecture)),
            max_context_length=plan.max_seq_len,
            vocab_size=plan.megatron.vocab_size,
            num_parameters=plan.parameters,
            tokenizer_path=folder if (folder / "tokenizer.json").is_file() else None,
            eos_token_ids=await asyncio.to_thread(_eos_token_ids, folder, hf_config),
            dtype=self._dtype,
            hf_config=hf_config,
            adapter_sizes=adapter_sizes(read_shape(hf_config)),
        )
        return BaseModel(folder, hf_config, plan, served)

    def plan(self, hf_config: Mapping[str, Any], lora_rank: int | None) -> Plan:
        """lora_rank None: full-parameter training. Raises PlanRefused."""
        cluster = self._config.cluster
        sizes = {name: getattr(cluster, name) for name in (*_SIZES, "microbatch_tokens")}
        constraints = PlanConstraints(lora_rank=lora_rank, dtype=self._dtype, **sizes)
        return self._builder.build(hf_config, constraints)

    def pool_settings(self, name: str, base: BaseModel, plan: Plan) -> PoolSettings:
        """name: of the pool, of its placement group, and of its folders of state and logs."""
        cluster, data_dir = self._config.cluster, self._config.data_dir
        on_cpu = cluster.device == "cpu"
        group = GroupSettings(
            name=name,
            plan=plan,
            base_model=base.name,
            folder=base.folder,
            state_dir=data_dir / MODELS_FOLDER / _file_name(name),
            prepare=cluster.prepare or (CPU_PREPARE if on_cpu else None),
            rank_class=MILES_RANK if cluster.trainer == "miles" else MEGATRON_RANK,
            timeout_s=cluster.operation_timeout_s,
            start_timeout_s=cluster.start_timeout_s,
        )
        rollout = RolloutSettings(
            name=name,
            model_path=base.folder,
            arguments=self._engine_arguments(plan),
            eos_token_ids=base.served.eos_token_ids,
            log_dir=data_dir / "cluster" / "logs" / _file_name(name),
            command=engine_command(cluster),
            kv_tokens=plan.rollout.kv_tokens,
            options=(*(CPU_OPTIONS if on_cpu else ()), *shlex.split(cluster.sglang_args or "")),
            environment=stand_ins_variables() if on_cpu else {},
            # A Ray of our own is this machine alone: nobody elsewhere needs to reach its engines.
            host="127.0.0.1" if cluster.ray_address is None else None,
            start_timeout_s=cluster.start_timeout_s,
            request_timeout_s=cluster.sample_timeout_s,
        )
        bundles = num_bundles(plan)
        if cluster.trainer == "miles":
            bundles -= plan.layout.world  # Miles makes a placement group of its own for its ranks
        timeout_s = cluster.placement_timeout_s
        request = Request(name, bundles, cluster.strategy, cluster.device, timeout_s)
        return PoolSettings(group, rollout, request)

    def _engine_arguments(self, plan: Plan) -> SglangArguments:
        """SGLang's memory saver needs CUDA; elsewhere there is no GPU memory to hand over."""
        if self._config.cluster.device == "cuda":
            return plan.sglang
        return replace(plan.sglang, enable_memory_saver=False, enable_weights_cpu_backup=False)


def weights_dtype(config: Config) -> Dtype:
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if config.cluster.device == "cuda" else "float32"


def engine_command(config: ClusterConfig) -> tuple[str, ...]:
    if config.sglang_command is None:
        return (sys.executable, "-m", ENGINE_ENTRY)
    return tuple(shlex.split(config.sglang_command))


def _eos_token_ids(folder: Path, hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of both files: chat models name the token that ends a turn in generation_config.json only."""
    ids = worker_jobs.token_ids(hf_config.get("eos_token_id"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids += worker_jobs.token_ids(worker_jobs.read_json(generation).get("eos_token_id"))
    return tuple(dict.fromkeys(ids))


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
