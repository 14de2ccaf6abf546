"""A tar of a checkpoint's files, laid out without being written."""

import tarfile

from tinkercloud.services.checkpoints.external_files import FileSlice, Parts

_BLOCK = tarfile.BLOCKSIZE


def tar_of(files: dict[str, Parts], modified_at: float) -> Parts:
    """The archive's content. GNU format: other formats end at 8 GiB for a file."""
    parts: list[bytes | FileSlice] = []
    for name, content in files.items():
        member = tarfile.TarInfo(name)
        member.size, member.mtime = content.num_bytes, int(modified_at)
        parts += [member.tobuf(tarfile.GNU_FORMAT), *content.parts]
        parts.append(bytes(-content.num_bytes % _BLOCK))
    parts.append(bytes(2 * _BLOCK))  # the end of an archive
    return Parts(tuple(parts))
