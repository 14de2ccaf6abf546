"""An ordinary training script, and how it ends: run as a module with the base model, the seconds
that its checkpoints are kept, and one of `ENDS`."""

import os
import signal
import sys
from collections.abc import Sequence

import numpy as np
import tinker

from benchmarks.lib.server import sdk_datum

ENDS = ("closes", "leaves", "is killed")
"""It finishes its session; it just ends, as most scripts do; it is killed during a pass."""
NUM_STEPS = 3
DONE = "done"
"""Said when all is done but the end of the interpreter, which has a way of its own to fail."""


def main(arguments: Sequence[str]) -> None:
    base_model, kept_s, end = arguments
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base_model, rank=8).result()
    tokens = np.arange(3, 35, dtype=np.int32)
    inputs = {
        "target_tokens": np.roll(tokens, -1).astype(np.int64),
        "weights": np.ones(len(tokens), dtype=np.float32),
    }
    data = [sdk_datum(tinker, tokens, inputs) for _ in range(4)]
    for _ in range(NUM_STEPS):
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-3))
        passed.result()
        stepped.result()
    training.save_state("end", ttl_seconds=int(float(kept_s))).result()
    sampling = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(tokens.tolist())
    params = tinker.SamplingParams(max_tokens=8, temperature=1.0)
    sampling.sample(prompt, num_samples=4, sampling_params=params).result()
    if end == "closes":
        service.close("success").result()
    sys.stdout.write(DONE)
    sys.stdout.flush()
    if end == "is killed":
        training.forward_backward(data, "cross_entropy")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
