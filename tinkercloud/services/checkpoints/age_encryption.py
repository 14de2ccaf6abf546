"""Exports encrypted to their recipients with age (https://age-encryption.org/v1)."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinkercloud.errors import InvalidRequest, UserError

SUFFIX = ".age"
MAX_RECIPIENTS = 10  # wire specification, section 3.3
MAX_RECIPIENT_CHARS = 4096  # an SSH key of 16384 bits has 2,800


def recipients_of(texts: Sequence[str]) -> list[Any]:
    """What pyrage encrypts to. Raises InvalidRequest for what is no public key, and UserError
    where pyrage is not installed."""
    if not texts:
        return []
    if len(texts) > MAX_RECIPIENTS:
        raise InvalidRequest(
            f"age_encryption_recipients has {len(texts)} keys; {MAX_RECIPIENTS} are the most"
        )
    try:
        pyrage = _pyrage()
    except ModuleNotFoundError:
        raise UserError(
            "this server cannot encrypt to age recipients: it lacks pyrage (its operator runs "
            "pip install 'tinkercloud[age]'); save without age_encryption_recipients"
        ) from None
    recipients: list[Any] = []
    for index, text in enumerate(texts):
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            if len(text) > MAX_RECIPIENT_CHARS:
                raise pyrage.RecipientError("too long")
            recipients.append(kind.Recipient.from_str(text))
        except pyrage.RecipientError:
            # Without its text: a secret key may have been given in its place.
            raise InvalidRequest(
                f"age_encryption_recipients[{index}] is no public key of age (age1...) or SSH "
                "(ssh-ed25519, ssh-rsa)"
            ) from None
    return recipients


def encrypt_files(directory: Path, recipients: Sequence[Any]) -> None:
    """Replace every file of a folder by NAME.age; nothing happens without recipients."""
    if not recipients:
        return
    pyrage = _pyrage()
    for path in sorted(directory.iterdir()):
        target = path.with_name(path.name + SUFFIX)
        # Not encrypt_file: it holds the interpreter's lock for the whole of a file, and the server
        # would answer nobody meanwhile (half a second for 200 MB).
        with path.open("rb") as plain, target.open("wb") as encrypted:
            pyrage.encrypt_io(plain, encrypted, list(recipients))
        path.unlink()


def _pyrage() -> Any:
    """By name: its type stubs lack functions that it has. Raises ModuleNotFoundError."""
    return importlib.import_module("pyrage")
