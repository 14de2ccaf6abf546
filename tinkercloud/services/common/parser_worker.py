"""`python -m tinkercloud.services.common.parser_worker`: parses JSON bodies for the API process.

Length-prefixed pickles on standard input and output; both ends are this project's own code. A job
is a function and a body. It ends with its standard input, or when a body has left it large.
"""

import gc
import pickle
import resource
import struct
import sys
from pathlib import Path
from typing import IO, Any

from tinkercloud.errors import PayloadTooLarge

HEADER = struct.Struct("<Q")
MEMORY_BYTES = 2 * 1024**3
"""Beyond what it has at its start. JSON takes thirty times its length at worst."""
LARGE_KB = 512 * 1024
"""A process that had more is replaced: Python gives little of it back."""


def read_message(source: IO[bytes]) -> Any:
    """EOFError at the end."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return pickle.loads(source.read(*HEADER.unpack(header)))


def write_message(target: IO[bytes], value: object) -> None:
    message = pickle.dumps(value, protocol=5)
    target.write(HEADER.pack(len(message)))
    target.write(message)
    target.flush()


def _result(job: Any) -> object:
    """What it returns, or the error that it raises."""
    function, body = job
    try:
        return function(body)
    except MemoryError:
        return PayloadTooLarge("the JSON body takes too much memory; send less in one request")
    except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
        return error


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, hard))
    gc.disable()  # of JSON no cycles are left, and to look for them takes longer than to parse
    while True:
        try:
            job = read_message(sys.stdin.buffer)
        except EOFError:
            return
        result = _result(job)
        del job
        is_last = _peak_kb() > LARGE_KB
        write_message(sys.stdout.buffer, (result, is_last))
        del result
        if is_last:
            return


def _peak_kb() -> int:
    """Of this program alone: `ru_maxrss` begins with that of the process which started it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # no Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    main()
