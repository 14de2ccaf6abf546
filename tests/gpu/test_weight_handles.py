"""Tensors of this process by handle in another, on the same GPU."""

import base64
import pickle
import subprocess
import sys

import torch

from tests.serving import ROOT
from tinkercloud.cluster.weights.sender import _pickled

READER = """
import base64, os, pickle, sys, torch
from torch.multiprocessing import reductions

def device_of(unique):
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == unique:
            return index
    raise SystemExit(f"no GPU {unique}")

original = reductions.rebuild_cuda_tensor

def rebuild(*arguments):
    place = 6
    given = arguments[place]
    index = device_of(given) if isinstance(given, str) else given
    return original(*arguments[:place], index, *arguments[place + 1:])

reductions.rebuild_cuda_tensor = rebuild
torch.cuda.init()
found = pickle.loads(base64.b64decode(sys.stdin.read()))
print({name: float(tensor.double().sum()) for name, tensor in found})
"""


def test_another_process_reads_the_same_numbers():
    bucket = [(f"w{i}", torch.randn(64, 32, device="cuda")) for i in range(3)]
    handles = _pickled(bucket)
    assert len(pickle.dumps(handles)) < sum(t.nbytes for _, t in bucket), "handles, not numbers"
    assert base64.b64decode(handles)
    told = subprocess.run(
        [sys.executable, "-c", READER],
        input=handles, capture_output=True, text=True, cwd=ROOT, timeout=120, check=True,
    )  # fmt: skip
    expected = {name: float(tensor.double().sum()) for name, tensor in bucket}
    assert told.stdout.strip() == str(expected)
