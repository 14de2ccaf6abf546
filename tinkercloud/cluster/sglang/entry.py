"""What an engine process runs: SGLang's server with our law of sampling and of stopping.

`python -m tinkercloud.cluster.sglang.entry OPTIONS OF sglang.launch_server`. Needs torch, numpy and
sglang only. SGLang's schedulers are spawned, and a spawned process imports the main module again:
what happens at import here happens in each of them too.
"""

# pyright: reportMissingImports=false
# SGLang has an environment of its own.

import os
import sys

from sglang.srt.arg_groups.choices import BUILT_IN_SAMPLING_BACKENDS
from sglang.srt.layers.sampler import register_sampler_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tinkercloud.cluster.sglang import sampler as law
from tinkercloud.cluster.sglang import weight_digests as weights

_BATCH = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"


def register() -> None:
    """The sampler, and hooks that carry its parameters through SGLang's batches; and
    hooks that note which weights arrive.

    Under SGLang's own names for its samplers: a request without a law is sampled by whichever of
    them the server was given. SGLang applies the hooks when a process loads its plugins.
    """
    for backend in BUILT_IN_SAMPLING_BACKENDS:
        register_sampler_backend(backend, law.LawSampler)
    after = {
        "adjusted_from_schedule_batch": law.attach,
        "adjusted_filter_batch": law.keep_rows,
        "adjusted_merge_batch": law.append_rows,
    }
    for method, hook in after.items():
        HookRegistry.register(f"{_BATCH}.{method}", hook, HookType.REPLACE)
    around = {
        f"{_BATCH}.copy_for_forward": law.copy_with_rows,
        f"{_REQUEST}._check_token_based_finish": law.check_stop,
        f"{_UPDATER}.begin_weight_update": weights.forget,
        f"{_UPDATER}.update_weights_from_tensor": weights.note_tensors,
        f"{_UPDATER}.load_weights_from_distributed": weights.note_broadcast,
        f"{_RUNNER}.check_weights": weights.tell,
    }
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def main() -> None:
    """Serve until the process is told to end; nothing of it outlives it."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


register()

if __name__ == "__main__":
    main()
