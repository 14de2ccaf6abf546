"""Why an actor ended, in a sentence (Ray's own words fill a page); and how one is ended."""

import asyncio
import logging
import re
from typing import Any

logger = logging.getLogger(__name__)

_USED = re.compile(r"was (\S+GB used / \S+GB) limit")
_ADDRESS = re.compile(r"Memory on the node \(IP: ([^,]+),")


def cause_of_death(error: BaseException) -> str:
    """error: what a call of the actor raised."""
    from ray.exceptions import OutOfMemoryError

    text = str(error).strip()
    if isinstance(error, OutOfMemoryError):
        return _out_of_memory(text)
    return text.splitlines()[0] if text else "its actor ended"


def _out_of_memory(text: str) -> str:
    used, address = _USED.search(text), _ADDRESS.search(text)
    where = f"its node {address.group(1)}" if address else "its node"
    how_full = f" ({used.group(1)})" if used else ""
    return (
        f"{where} ran out of memory{how_full} and Ray ended the process (OutOfMemoryError): give "
        "it more memory, or plan for less of it (shorter --cluster-max-seq-len, a smaller "
        "--cluster-microbatch-tokens, more GPUs). RAY_memory_usage_threshold, set where Ray is "
        "started, is the share of memory above which Ray ends processes"
    )


async def kill(actor: Any) -> None:
    """End its process; never raises: where Ray itself is gone, so is the process."""
    import ray
    from ray.exceptions import RayError

    try:
        await asyncio.to_thread(ray.kill, actor, no_restart=True)
    except (RayError, RuntimeError, ValueError) as error:
        logger.warning("an actor could not be killed: %s", error)
