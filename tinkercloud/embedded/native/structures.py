"""The structures that C code reads, as ctypes has them: those of the headers in kernels/.

Field names are those in C. A mirror that differs would have C read one field's bytes as another's,
so all are compared with what the library says of itself (layouts.c) when it is loaded.
"""

import ctypes as c

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


ACTIVATIONS = ("silu", "gelu_tanh")
"""Their numbers in C."""


class Linear(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("weight", "bias")),
        *((name, c.c_int64) for name in ("out", "in", "width")),
        ("salient", c.c_void_p),
        ("num_salient", c.c_int64),
    )


class Matrix(c.Structure):
    _fields_ = tuple((name, c.c_int64) for name in ("is_narrow", "out", "k", "width"))


class Packing(c.Structure):
    _fields_ = (("matrix", Matrix), ("from", c.c_void_p), ("to", c.c_void_p))


class Layer(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("input_norm", "mixed_norm", "mlp_norm", "fed_norm")),
        *((name, c.c_void_p) for name in ("q_norm", "k_norm")),
        ("linear", Linear * len(MODULES)),
        *((name, c.c_void_p) for name in ("keys", "values", "key_dims")),
        *((name, c.c_int64) for name in ("window", "rotary")),
    )


class DraftHead(c.Structure):
    _fields_ = (
        ("fuse", Linear),
        ("num_states", c.c_int64),
        *((name, c.c_void_p) for name in ("embed_norm", "feature_norm", "ids")),
    )


class Model(c.Structure):
    _fields_ = (
        *(
            (name, c.c_int64)
            for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab")
        ),
        *((name, c.c_int64) for name in ("is_narrow", "norm_spans_heads", "activation")),
        *((name, c.c_int64) for name in ("num_rotated", "rotates_neighbours")),
        *((name, c.c_int64) for name in ("num_rotary", "key_errors")),
        *((name, c.c_float) for name in ("eps", "score_scale", "score_cap")),
        *((name, c.c_float) for name in ("embedding_scale", "residual_scale", "logit_cap")),
        ("embed", c.c_void_p),
        *((name, c.c_int64) for name in ("embed_width", "embed_is_narrow")),
        ("final_norm", c.c_void_p),
        ("head", Linear),
        ("layers", c.POINTER(Layer)),
        ("draft", c.POINTER(DraftHead)),
    )


class Lora(c.Structure):
    _fields_ = (("a", c.c_void_p), ("b", c.c_void_p), ("rank", c.c_int64))


class Segment(c.Structure):
    _fields_ = (
        ("first", c.c_int64),
        ("count", c.c_int64),
        ("scale", c.c_float),
        ("modules", c.POINTER(Lora)),
    )


class Kept(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("middle", "mixed_out", "fed_out", "raw_q", "raw_k")),
        *((name, c.c_void_p) for name in ("q", "k", "v", "mixed", "gates")),
    )


class Scores(c.Structure):
    _fields_ = (
        ("num_rows", c.c_int64),
        *((name, c.c_void_p) for name in ("rows", "starts", "ids", "logits", "norms")),
    )


class Draw(c.Structure):
    _fields_ = (
        ("temperature", c.c_float),
        ("top_k", c.c_int64),
        ("top_p", c.c_double),
        *((name, c.c_uint64) for name in ("seed", "sample", "position")),
    )


class Drawing(c.Structure):
    _fields_ = (
        ("num_rows", c.c_int64),
        ("limit", c.c_int64),
        ("rows", c.c_void_p),
        ("draws", c.POINTER(Draw)),
        *((name, c.c_void_p) for name in ("norms", "count", "ids", "words", "weights")),
        *((name, c.c_void_p) for name in ("kept", "logits", "drafted", "drafted_logits")),
    )


class Guesses(c.Structure):
    _fields_ = (
        ("num_rows", c.c_int64),
        ("rows", c.c_void_p),
        ("draws", c.POINTER(Draw)),
        *((name, c.c_void_p) for name in ("ids", "leads")),
    )


class Batch(c.Structure):
    _fields_ = (
        *((name, c.c_int64) for name in ("rows", "embeds", "first_layer", "end_layer")),
        ("x", c.c_void_p),
        ("kept", c.POINTER(Kept)),
        *((name, c.c_void_p) for name in ("tokens", "positions", "sequence", "tables")),
        ("table_stride", c.c_int64),
        *((name, c.c_void_p) for name in ("cosine", "sine")),
        ("num_segments", c.c_int64),
        ("segments", c.POINTER(Segment)),
        ("num_logit_rows", c.c_int64),
        ("logit_rows", c.c_void_p),
        ("num_captured", c.c_int64),
        *((name, c.c_void_p) for name in ("captured_layers", "captured", "hidden", "logits")),
        ("scores", c.POINTER(Scores)),
        ("drawing", c.POINTER(Drawing)),
        *((name, c.c_void_p) for name in ("times", "states")),
        ("guesses", c.POINTER(Guesses)),
    )


class Chains(c.Structure):
    _fields_ = (
        *((name, c.c_int64) for name in ("chains", "steps")),
        *((name, c.c_void_p) for name in ("most", "outputs", "lengths", "tables")),
        ("table_stride", c.c_int64),
        *((name, c.c_void_p) for name in ("cosine", "sine")),
        ("draws", c.POINTER(Draw)),
        *((name, c.c_void_p) for name in ("tokens", "leads")),
        ("least_lead", c.c_float),
    )


class Scan(c.Structure):
    _fields_ = (
        ("logits", c.c_void_p),
        *((name, c.c_int64) for name in ("rows", "size", "limit")),
        ("draws", c.POINTER(Draw)),
        *((name, c.c_void_p) for name in ("best", "norm", "count", "ids", "words")),
    )


class AttentionGradient(c.Structure):
    _fields_ = (
        *(
            (name, c.c_int64)
            for name in ("is_narrow", "num_sequences", "heads", "kv_heads", "head_dim", "window")
        ),
        *((name, c.c_float) for name in ("scale", "cap")),
        *((name, c.c_void_p) for name in ("q", "k", "v", "dout")),
        *((f"{name}_stride", c.c_int64) for name in ("q", "k", "v", "dout")),
        *((name, c.c_void_p) for name in ("dq", "dk", "dv")),
        *((f"{name}_stride", c.c_int64) for name in ("dq", "dk", "dv")),
        *((name, c.c_void_p) for name in ("starts", "rows", "out_rows", "owned")),
    )


class ModuleGradient(c.Structure):
    _fields_ = (
        ("weight", c.c_void_p),
        *((name, c.c_int64) for name in ("out", "width", "column")),
    )


class LoraGradient(c.Structure):
    _fields_ = tuple((name, c.c_void_p) for name in ("a", "b", "da", "db"))


class SegmentGradient(c.Structure):
    _fields_ = (
        *((name, c.c_int64) for name in ("first", "count", "rank")),
        ("scale", c.c_float),
        ("modules", c.POINTER(LoraGradient)),
    )


class SoftmaxGradient(c.Structure):
    _fields_ = tuple(
        (name, c.c_void_p) for name in ("norms", "totals", "starts", "ids", "gradients")
    )


class LinearGradient(c.Structure):
    _fields_ = (
        *((name, c.c_int64) for name in ("is_narrow", "activation", "rows", "in", "num_modules")),
        ("modules", c.POINTER(ModuleGradient)),
        *((name, c.c_void_p) for name in ("x", "x_gates", "dy")),
        ("dy_row", c.c_int64),
        ("softmax", c.POINTER(SoftmaxGradient)),
        *((name, c.c_void_p) for name in ("dy_gates", "dx")),
        ("num_segments", c.c_int64),
        ("segments", c.POINTER(SegmentGradient)),
    )


class SuffixMatch(c.Structure):
    _fields_ = (("automaton", c.c_void_p), ("state", c.c_int32), ("length", c.c_int32))


class SuffixMatches(c.Structure):
    _fields_ = (
        ("matches", c.POINTER(SuffixMatch)),
        ("num", c.c_int64),
        ("drafted_from", SuffixMatch),
    )


class SuffixRule(c.Structure):
    _fields_ = (
        *((name, c.c_double) for name in ("share", "doubt", "shorter", "longest", "factor")),
        *((name, c.c_int64) for name in ("shortest", "num_shorter", "skips_mismatches")),
    )


MIRRORS: dict[str, type[c.Structure]] = {
    "linear": Linear,
    "matrix": Matrix,
    "packing": Packing,
    "layer": Layer,
    "draft_head": DraftHead,
    "model": Model,
    "lora": Lora,
    "segment": Segment,
    "kept": Kept,
    "batch": Batch,
    "guesses": Guesses,
    "chains": Chains,
    "scores": Scores,
    "drawing": Drawing,
    "draw": Draw,
    "scan": Scan,
    "match": SuffixMatch,
    "suffix_matches": SuffixMatches,
    "suffix_rule": SuffixRule,
    "attention_gradient": AttentionGradient,
    "module_gradient": ModuleGradient,
    "lora_gradient": LoraGradient,
    "segment_gradient": SegmentGradient,
    "softmax_gradient": SoftmaxGradient,
    "linear_gradient": LinearGradient,
}


class StructureMismatch(RuntimeError):
    """A structure is not the same in C and in Python."""


class _Layout(c.Structure):
    """A structure (field None) or a field, as C has it."""

    _fields_ = (
        ("structure", c.c_char_p),
        ("field", c.c_char_p),
        ("offset", c.c_int64),
        ("size", c.c_int64),
    )


Extent = tuple[int, int]
"""Where a field begins in its structure, and how long it is, in bytes."""


def check_structures(library: c.CDLL) -> None:
    """Raises StructureMismatch, which names the first structure and field that differ."""
    num = c.c_int64.in_dll(library, "num_layouts").value
    layouts = (_Layout * num).in_dll(library, "layouts")
    in_c: dict[str, dict[str | None, Extent]] = {}
    for layout in layouts:
        fields = in_c.setdefault(layout.structure.decode(), {})
        name = layout.field.decode() if layout.field else None
        fields[name] = (layout.offset, layout.size)
    in_python = {name: _extents(mirror) for name, mirror in MIRRORS.items()}
    for name in sorted(in_c.keys() | in_python.keys()):
        _compare(name, in_c.get(name, {}), in_python.get(name, {}))


def _extents(mirror: type[c.Structure]) -> dict[str | None, Extent]:
    fields = {name: getattr(mirror, name) for name, *_ in mirror._fields_}
    extents: dict[str | None, Extent] = {n: (f.offset, f.size) for n, f in fields.items()}
    return {None: (0, c.sizeof(mirror)), **extents}


def _compare(
    structure: str, in_c: dict[str | None, Extent], in_python: dict[str | None, Extent]
) -> None:
    # In C's order and the whole last: the first field that differs moves those after it.
    for field in sorted({**in_c, **in_python}, key=lambda name: name is None):
        if in_c.get(field) != in_python.get(field):
            raise StructureMismatch(
                f"structure {structure}, {f'field {field}' if field else 'as a whole'}: "
                f"{_shown(in_c.get(field))} in C, {_shown(in_python.get(field))} in Python"
            )


def _shown(extent: Extent | None) -> str:
    return "missing" if extent is None else f"{extent[1]} bytes at {extent[0]}"
