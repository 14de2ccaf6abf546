"""A GGUF file's weights unpacked into another GGUF file, for llama.cpp at the precision that is
compared: what a quantised file holds is multiplied by other, cheaper kernels."""

import os
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

TYPES = {"float32": GGMLQuantizationType.F32, "bfloat16": GGMLQuantizationType.BF16}
FILE_TYPES = {"float32": 0, "bfloat16": 32}  # LLAMA_FTYPE_ALL_F32, LLAMA_FTYPE_MOSTLY_BF16
WRITTEN_ANEW = ("GGUF.", "general.architecture", "general.file_type")


def unpack(source: Path, folder: Path, dtype: str) -> Path:
    """The file below `folder`, written once. Vectors (norms) stay float32, as llama.cpp wants."""
    target = folder / f"{source.stem}.{dtype}.gguf"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a file under its final name is always whole.
    handle, name = tempfile.mkstemp(dir=folder, suffix=".partial")
    os.close(handle)
    try:
        _write(GGUFReader(source), Path(name), dtype)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def _write(reader: GGUFReader, path: Path, dtype: str) -> None:
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(path, architecture)
    writer.add_file_type(FILE_TYPES[dtype])
    for field in reader.fields.values():
        if not field.name.startswith(WRITTEN_ANEW):
            kind, inner = field.types[0], field.types[-1]
            sub_type = inner if kind is GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
    for tensor in reader.tensors:
        wide = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = TYPES[dtype] if wide.ndim > 1 else GGMLQuantizationType.F32
        packed = wide if kind is GGMLQuantizationType.F32 else quantize(wide, kind)
        writer.add_tensor(tensor.name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
