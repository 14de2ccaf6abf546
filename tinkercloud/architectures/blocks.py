"""Parts of a decoder's block that families have in different places or ways. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The norms of a block by their names in checkpoints; None: there is none at that place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in places if name is not None)


PRE_NORMS = LayerNorms()


@dataclass(frozen=True, slots=True)
class Scoring:
    """What attention makes of q k: cap * tanh(scale * q k / cap), cap 0: scale * q k. window: a row
    sees that many positions, its own the last of them; 0: all up to its own."""

    scale: float
    cap: float = 0.0
    window: int = 0

    @property
    def is_scaled_only(self) -> bool:
        return not (self.cap or self.window)
