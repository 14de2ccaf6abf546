"""Tensors, prompts and training examples.

Axes: N tokens of a datum, K alternative targets.
"""

import base64
import binascii
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from tinker_gmi.bodies.provenance import ProvenanceSpans, check_tiling
from tinker_gmi.bodies.wire_model import WireModel
from tinkercloud.wire.codec import check_csr, densify_csr, reshaped

if TYPE_CHECKING:
    import torch

TensorDtype = Literal["int64", "float32"]
ImageFormat = Literal["png", "jpeg"]

_NUMPY_DTYPES: dict[str, type[np.generic]] = {"int64": np.int64, "float32": np.float32}

INPUT_DTYPES: dict[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "logprobs": "float32",
    "advantages": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
"""What a plain Python list becomes, by the name of the loss input (specification 6.2)."""


class TensorData(WireModel):
    """A tensor: dense, or sparse in CSR form (unlisted entries are 0).

    `values` is the array behind it: shaped like `shape` when dense, the 1-D listed values when
    sparse. On the wire it is the flat list `data`. Without `shape` a flat list is 1-D.
    """

    dtype: TensorDtype
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None
    values: NDArray[Any] = Field(
        default_factory=list, alias="data", repr=False, validate_default=True
    )

    @field_validator("values", mode="plain")
    @classmethod
    def _to_array(cls, value: Any, info: ValidationInfo) -> NDArray[Any]:
        if "dtype" not in info.data:  # already reported by the field itself
            return np.empty(0)
        return _as_dtype(value, info.data["dtype"])

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if (self.sparse_crow_indices is None) != (self.sparse_col_indices is None):
            raise ValueError("sparse_crow_indices and sparse_col_indices come as a pair")
        if self.is_sparse:
            self.values = self.values.reshape(-1)
            check_csr(*self._csr())
        elif self.shape is None:
            self.shape = list(self.values.shape)
        else:
            self.values = reshaped(self.values.reshape(-1), tuple(self.shape))
        return self

    @field_serializer("values")
    def _to_list(self, value: NDArray[Any]) -> list[Any]:
        return value.reshape(-1).tolist()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TensorData)
            and self.dtype == other.dtype
            and np.array_equal(self.to_numpy(), other.to_numpy(), equal_nan=self.dtype != "int64")
        )

    __hash__ = None  # type: ignore[assignment]  # arrays are mutable

    @property
    def data(self) -> list[Any]:
        """The flat list of numbers (only the listed ones when sparse)."""
        return self.values.reshape(-1).tolist()

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> Self:
        """Floats become float32, integers int64."""
        dtype: TensorDtype = "float32" if array.dtype.kind == "f" else "int64"
        return cls(dtype=dtype, shape=list(array.shape), data=array)

    @classmethod
    def from_torch(cls, tensor: "torch.Tensor") -> Self:
        """Like from_numpy; sparse tensors are densified, bfloat16 widened."""
        dense = tensor.detach().to_dense() if tensor.is_sparse_csr else tensor.detach()
        dense = dense.float() if dense.is_floating_point() else dense
        return cls.from_numpy(dense.cpu().numpy())

    @classmethod
    def from_torch_sparse(cls, tensor: "torch.Tensor") -> Self:
        """A 2-D tensor, in CSR form where that is smaller; zeros are not listed."""
        dense = cls.from_torch(tensor).values
        return cls.from_numpy(dense) if dense.ndim != 2 else cls._compressed(dense)

    @classmethod
    def _compressed(cls, dense: NDArray[Any]) -> Self:
        rows, columns = np.nonzero(dense)
        crow = np.searchsorted(rows, np.arange(len(dense) + 1)).astype(np.int64)
        width = 4 if dense.dtype.kind == "f" else 8
        if len(rows) * (width + 8) + crow.nbytes >= dense.size * width:
            return cls.from_numpy(dense)
        return cls(
            dtype="float32" if dense.dtype.kind == "f" else "int64",
            shape=list(dense.shape),
            data=dense[rows, columns],
            sparse_crow_indices=crow.tolist(),
            sparse_col_indices=columns.tolist(),
        )

    def to_numpy(self) -> NDArray[Any]:
        """Dense, float32 or int64."""
        return densify_csr(*self._csr()) if self.is_sparse else self.values

    @property
    def is_sparse(self) -> bool:
        return self.sparse_crow_indices is not None

    def _csr(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], tuple[int, ...]]:
        crow = _as_dtype(self.sparse_crow_indices, "int64")
        columns = _as_dtype(self.sparse_col_indices, "int64")
        return self.values, crow, columns, tuple(self.shape or ())

    def to_torch(self) -> "torch.Tensor":
        """Dense, torch.float32 or torch.int64."""
        torch_module = importlib.import_module("torch")
        return torch_module.from_numpy(np.array(self.to_numpy()))

    def tolist(self) -> list[Any]:
        return self.to_numpy().tolist()


def _as_dtype(value: Any, dtype: TensorDtype) -> NDArray[Any]:
    array = np.asarray(value)
    if array.size == 0:
        return array.astype(_NUMPY_DTYPES[dtype])
    if array.dtype.kind not in "iufb":
        raise ValueError("data must be a rectangular array of numbers within 64 bits")
    if dtype == "int64" and array.dtype.kind not in "ib":
        limit = 2**63
        if not bool(np.all((array == np.trunc(array)) & (array < limit) & (array >= -limit))):
            raise ValueError("data of dtype int64 must be whole numbers within 64 bits")
    with np.errstate(over="ignore"):  # a double beyond float32 is inf, as in any float32 store
        return array.astype(_NUMPY_DTYPES[dtype])


class EncodedTextChunk(WireModel):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"

    @field_validator("tokens", mode="before")
    @classmethod
    def _from_array(cls, value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else value

    @property
    def length(self) -> int:
        return len(self.tokens)


class _BinaryChunk(WireModel):
    @staticmethod
    def _decode(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from error


class ImageChunk(_BinaryChunk):
    """`data` is the encoded file; base64 on the wire."""

    data: bytes
    format: ImageFormat
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    @field_validator("data", mode="before")
    @classmethod
    def _decode_data(cls, value: Any) -> Any:
        return cls._decode(value)

    @field_serializer("data")
    def _encode_data(self, value: bytes) -> str:
        return base64.b64encode(value).decode("ascii")

    @property
    def length(self) -> int:
        return _expected(self.expected_tokens)


class ImageAssetPointerChunk(WireModel):
    location: str
    format: ImageFormat
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        return _expected(self.expected_tokens)


class DmelChunk(_BinaryChunk):
    """Audio in an opaque container; base64 on the wire."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    @field_validator("dmel", mode="before")
    @classmethod
    def _decode_dmel(cls, value: Any) -> Any:
        return cls._decode(value)

    @field_serializer("dmel")
    def _encode_dmel(self, value: bytes) -> str:
        return base64.b64encode(value).decode("ascii")

    @property
    def length(self) -> int:
        raise ValueError("the length of an audio chunk is known to the server only")


def _expected(expected_tokens: int | None) -> int:
    if expected_tokens is None:
        raise ValueError("the length of an image is known only when expected_tokens is set")
    return expected_tokens


def _chunk_type(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return str(cast("Mapping[str, Any]", value).get("type", "encoded_text"))
    return getattr(value, "type", None)


ModelInputChunk = Annotated[
    Annotated[EncodedTextChunk, Tag("encoded_text")]
    | Annotated[ImageChunk, Tag("image")]
    | Annotated[ImageAssetPointerChunk, Tag("image_asset_pointer")]
    | Annotated[DmelChunk, Tag("dmel")],
    Discriminator(_chunk_type),
]
"""A chunk without a `type` is taken as encoded_text."""


class ModelInput(WireModel):
    """A prompt, or the input of a training example: chunks in order."""

    chunks: list[ModelInputChunk]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> Self:
        return cls(chunks=[EncodedTextChunk(tokens=list(tokens))])

    @classmethod
    def empty(cls) -> Self:
        return cls(chunks=[])

    @property
    def length(self) -> int:
        """In tokens, images by their expected_tokens."""
        return sum(chunk.length for chunk in self.chunks)

    def to_ints(self) -> list[int]:
        """Raises ValueError where a chunk is not text."""
        tokens: list[int] = []
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(f"a {chunk.type} chunk has no token ids")
            tokens.extend(chunk.tokens)
        return tokens

    def append(self, chunk: ModelInputChunk) -> Self:
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        return self.append(EncodedTextChunk(tokens=[token]))


LossFnInputs = dict[str, TensorData]


class Datum(WireModel):
    """One training example. Position i of the input predicts `target_tokens[i]`: the shift by one
    is the caller's. Inputs may be given as TensorData, numpy, torch, or (nested) lists."""

    model_input: ModelInput
    loss_fn_inputs: LossFnInputs = Field(default_factory=dict)
    model_input_spans: ProvenanceSpans | None = None
    loss_fn_input_spans: ProvenanceSpans | None = None

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise ValueError("model_input_spans and loss_fn_input_spans come as a pair")
        return self

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Self:
        """A copy that says which tokens were prompts and which were sampled; the second list is of
        `target_tokens`. Raises ValueError where the spans do not tile their field."""
        check_tiling("model_input", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and targets.shape is not None and len(targets.shape) == 1:
            check_tiling("loss_fn_inputs", loss_fn_inputs, targets.shape[0])
        return self.replace(model_input_spans=model_input, loss_fn_input_spans=loss_fn_inputs)

    @field_validator("loss_fn_inputs", mode="before")
    @classmethod
    def _to_tensors(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        items = cast("Mapping[Any, Any]", value).items()
        return {key: _to_tensor(str(key), item) for key, item in items}


def _to_tensor(key: str, value: Any) -> Any:
    if isinstance(value, TensorData | Mapping):
        return cast("Any", value)
    if hasattr(value, "detach"):  # torch, which is not imported for this
        sparse = key in ("target_tokens", "weights")
        return TensorData.from_torch_sparse(value) if sparse else TensorData.from_torch(value)
    array = np.asarray(value)
    inferred: TensorDtype = "float32" if array.dtype.kind == "f" else "int64"
    dtype = inferred if isinstance(value, np.ndarray) else INPUT_DTYPES.get(key, inferred)
    return TensorData(dtype=dtype, shape=list(array.shape), data=array)
