"""What an engine process runs: SGLang's server with our sampler and our stops.

`python -m tinkercloud.cluster.sglang.entry OPTIONS OF sglang.launch_server`. Needs torch, numpy and
sglang only. SGLang spawns its schedulers, and a spawned process imports the main module again: so
`register` runs at import, in each of them too.
"""

# pyright: reportMissingImports=false
# SGLang has an environment of its own.

import os
import sys

from sglang.srt.arg_groups.choices import BUILT_IN_SAMPLING_BACKENDS
from sglang.srt.layers.sampler import register_sampler_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tinkercloud.cluster.sglang import sampler, weight_digests
from tinkercloud.config import engine_key, shared_memory_folder, stand_ins_start_method
from tinkercloud.decoding.math_kernels import resolve_math_kernels

_BATCH = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"
_LOADS_FILE = "sglang.srt.managers.load_snapshot.shm_path_for"


def register() -> None:
    """The sampler, hooks that carry its parameters through SGLang's batches, hooks that record
    which weights arrive, and one that says where a file of shared memory goes.

    The sampler replaces all of SGLang's under their own names: it passes a request without our
    parameters on to the one that the server was started with. SGLang applies the hooks when a
    process loads its plugins.
    """
    resolve_math_kernels()
    for backend in BUILT_IN_SAMPLING_BACKENDS:
        register_sampler_backend(backend, sampler.SeededSampler)
    replaced = {
        "adjusted_from_schedule_batch": sampler.attach,
        "adjusted_filter_batch": sampler.keep_rows,
        "adjusted_merge_batch": sampler.append_rows,
    }
    for method, hook in replaced.items():
        HookRegistry.register(f"{_BATCH}.{method}", hook, HookType.REPLACE)
    wrapped = {
        f"{_BATCH}.copy_for_forward": sampler.copy_with_rows,
        f"{_REQUEST}._check_token_based_finish": sampler.check_stop,
        f"{_UPDATER}.begin_weight_update": weight_digests.clear,
        f"{_UPDATER}.update_weights_from_tensor": weight_digests.record_tensors,
        f"{_UPDATER}.load_weights_from_distributed": weight_digests.record_broadcast,
        f"{_RUNNER}.check_weights": weight_digests.report,
    }
    for target, hook in wrapped.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    if stand_ins_start_method() is not None:
        from tinkercloud.cluster.cpu import unembedding

        unembedding.register()
    if shared_memory_folder() is not None:
        HookRegistry.register(_LOADS_FILE, _loads_file, HookType.REPLACE)


def _loads_file(instance: str) -> str:
    """Of its loads, for its own processes. SGLang makes it in /dev/shm at each start and removes it
    never."""
    return f"{shared_memory_folder()}/loads-{instance}"


def main() -> None:
    """Serve until the process is ended; the processes that SGLang started end with it."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    key = engine_key()
    with_key = [] if key is None else [f"--api-key={key}"]  # one word: a key may begin with a dash
    try:
        run_server(prepare_server_args([*sys.argv[1:], *with_key]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


register()

if __name__ == "__main__":
    if stand_ins_start_method() == "fork":
        from tinkercloud.cluster.cpu import engines

        engines.fork()
    main()
