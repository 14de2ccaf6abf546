"""llama-server on the coordinator, over a plan of layers."""

from pathlib import Path

import httpx

from tinkercloud.pool.child_process import ChildProcess
from tinkercloud.pool.drafting import draft_arguments
from tinkercloud.pool.layer_plan import Device, LayerPlan
from tinkercloud.pool.pool_file import Coordinator

FLAGS = (
    *("--alias", "--ctx-size", "--parallel", "--kv-unified", "--ubatch-size", "--fit"),
    *("--cache-type-k", "--cache-type-v", "--flash-attn", "--n-gpu-layers", "--rpc", "--device"),
    *("--split-mode", "--tensor-split", "--threads", "--api-key-file", "--override-tensor"),
    "--cache-ram",
)
"""Of `server_command`, all of which a build has to know."""
LOGITS_ON_COORDINATOR = r"^(output|token_embd)\.weight$=CPU"
"""Tied weights have the embedding's name."""


def server_command(program: Path, coordinator: Coordinator, plan: LayerPlan) -> list[str]:
    """The coordinator's CPU holds the first layers, which is where llama.cpp leaves them; devices
    then come in the plan's order, RPC servers first."""
    model = plan.model
    offloaded = [share for share in plan.shares if not _is_own_cpu(share.device)]
    endpoints = [each.device.endpoint for each in offloaded if each.device.endpoint is not None]
    names = [f"RPC{index}" for index in range(len(endpoints))]
    names += [each.device.device for each in offloaded if each.device.endpoint is None]
    command = [str(program), "--model", str(model.path), "--alias", model.name]
    command += ["--host", coordinator.host, "--port", str(coordinator.port)]
    command += ["--ctx-size", str(model.context), "--parallel", str(model.parallel)]
    command += ["--kv-unified", "--ubatch-size", str(model.ubatch), "--fit", "off"]
    # Else keys and values of the prompt before, megabytes, come back over the network.
    command += ["--cache-ram", "0"]
    command += ["--cache-type-k", model.cache_type, "--cache-type-v", model.cache_type]
    command += ["--flash-attn", "on" if model.cache_type != "f16" else "auto"]
    command += ["--n-gpu-layers", str(sum(each.num_units for each in offloaded))]
    if endpoints:
        command += ["--rpc", ",".join(endpoints)]
    command += ["--device", ",".join(names) or "none"]
    if names:
        split = ",".join(str(each.num_units) for each in offloaded)
        command += ["--split-mode", "layer", "--tensor-split", split]
    if model.output is not None:
        command += ["--override-tensor", LOGITS_ON_COORDINATOR]
    if coordinator.threads is not None:
        command += ["--threads", str(coordinator.threads)]
    if coordinator.key_file is not None:
        command += ["--api-key-file", str(coordinator.key_file)]
    return command + draft_arguments(model)


class LlamaServer:
    def __init__(self, command: list[str], coordinator: Coordinator, log: Path):
        self._coordinator = coordinator
        log.unlink(missing_ok=True)  # what it says is of this start
        self._process = ChildProcess(command, log)
        self._http = httpx.Client(timeout=2.0, trust_env=False)

    @property
    def url(self) -> str:
        return self._coordinator.url

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.status is not None

    def is_ready(self) -> bool:
        """Whether the model is loaded."""
        try:
            return self._http.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    def reason(self) -> str:
        """The last lines of its log."""
        return self._process.log_end().replace("\n", " | ")

    def end(self) -> None:
        self._http.close()
        self._process.end()


def _is_own_cpu(device: Device) -> bool:
    return device.device == "CPU" and device.endpoint is None
