"""Sequence numbers of clients, and the keys that make a repeated request the same request.

Retries have a new idempotency key, so requests are the same by what they number (wire
specification, section 0).
"""

from tinkercloud.errors import InvalidRequest

MAX_TRAIN_SEQ_ID = 2**31 - 1  # int32 in the protobuf form (wire specification, section 6.1)
MAX_SEQ_ID = 2**63 - 1  # sampling clones start at n * 10**9 (wire specification, section 3.4)


def checked(name: str, value: int, *, lowest: int, highest: int = MAX_SEQ_ID) -> int:
    if not lowest <= value <= highest:
        raise InvalidRequest(f"{name} is {value}; it must lie in {lowest}..{highest}")
    return value


def train_seq_id(seq_id: int | None) -> int | None:
    """None: the client does not count; the request goes to the end of the lane."""
    if seq_id is None:
        return None
    return checked("seq_id", seq_id, lowest=1, highest=MAX_TRAIN_SEQ_ID)


def train_key(user: str, model_id: str, seq_id: int | None) -> str | None:
    return None if seq_id is None else f"train|{user}|{model_id}|{seq_id}"


def create_key(user: str, model_id: str) -> str:
    return f"create|{user}|{model_id}"


def unload_key(user: str, model_id: str) -> str:
    return f"unload|{user}|{model_id}"


def sample_key(user: str, sampler_id: str, seq_id: int | None) -> str | None:
    return None if seq_id is None else f"sample|{user}|{sampler_id}|{seq_id}"
