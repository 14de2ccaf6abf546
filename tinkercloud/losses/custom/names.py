"""What a custom loss may call, by the names that torch.fx records. No torch here: requests are
checked before anything is computed. `operations` has an operation of ours for each name.

Without: what draws random numbers, writes in place, leaves torch, or sizes its result by values.
"""

_TORCH = """
    abs absolute acos add addcdiv addcmul all amax amin aminmax any arange arccos arcsin arctan
    argmax argmin argsort asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor bmm
    broadcast_to cat ceil chunk clamp clamp_max clamp_min clip clone column_stack concat
    concatenate copysign cos cosh cosine_similarity count_nonzero cummax cummin cumprod cumsum
    deg2rad detach diagonal diff div divide dot eq erf erfc erfinv exp exp2 expm1 eye fix flatten
    flip fliplr flipud floor floor_divide fmax fmin fmod frac full full_like gather ge greater
    greater_equal gt heaviside hstack hypot index_select isclose isfinite isinf isnan isneginf
    isposinf kthvalue le lerp less less_equal lgamma linspace log log10 log1p log2 log_softmax
    logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor logit
    logsumexp lt masked_fill masked_select matmul max maximum mean median min minimum mm movedim
    mul multiply mv nan_to_num nanmean nanmedian nansum narrow ne neg negative not_equal ones
    ones_like outer permute pow prod quantile rad2deg ravel reciprocal relu remainder reshape roll
    round rsqrt scatter scatter_add select sgn sigmoid sign sin sinc sinh softmax sort sqrt square
    squeeze stack std std_mean sub subtract sum swapaxes swapdims t take_along_dim tan tanh tile
    topk trace transpose tril triu true_divide trunc unbind unflatten unsqueeze var var_mean vstack
    where xlogy zeros zeros_like
"""

_FUNCTIONAL = """
    binary_cross_entropy binary_cross_entropy_with_logits elu hardsigmoid
    hardswish hardtanh hinge_embedding_loss huber_loss kl_div l1_loss leaky_relu log_softmax
    margin_ranking_loss mish mse_loss normalize pad poisson_nll_loss relu relu6 selu sigmoid silu
    smooth_l1_loss soft_margin_loss softmax softmin softsign tanh
"""

_OTHER = """
    torch._C._linalg.linalg_norm torch._C._linalg.linalg_vecdot torch._C._linalg.linalg_vector_norm
    torch._C._nn.gelu torch._C._nn.log_sigmoid torch._C._nn.softplus
    torch._C._special.special_digamma torch._C._special.special_entr torch._C._special.special_erf
    torch._C._special.special_erfc torch._C._special.special_erfinv torch._C._special.special_exp2
    torch._C._special.special_expit torch._C._special.special_expm1
    torch._C._special.special_gammaln torch._C._special.special_log1p
    torch._C._special.special_log_ndtr torch._C._special.special_log_softmax
    torch._C._special.special_logit torch._C._special.special_logsumexp
    torch._C._special.special_ndtr torch._C._special.special_sinc torch._C._special.special_softmax
    torch._C._special.special_xlog1py torch._C._special.special_xlogy torch.functional.atleast_1d
    torch.functional.atleast_2d torch.functional.broadcast_tensors torch.functional.norm
    torch.functional.split
"""

_OPERATORS = """
    abs add and_ eq floordiv ge getitem gt invert le lt matmul mod mul ne neg or_ pos pow sub
    truediv xor iadd iand ifloordiv imatmul imod imul ior ipow isub itruediv ixor
"""

_MATH = """
    ceil copysign exp expm1 fabs floor fmod hypot log log10 log1p log2 pow sqrt tanh trunc
"""

FUNCTIONS = frozenset(
    [
        *(f"torch.{name}" for name in _TORCH.split()),
        *(f"torch.nn.functional.{name}" for name in _FUNCTIONAL.split()),
        *_OTHER.split(),
        *(f"operator.{name}" for name in _OPERATORS.split()),
        *(f"math.{name}" for name in _MATH.split()),
        "getattr",
    ]
)

# Methods that do what the function of their name does, and those that only tensors have.
_SHARED_METHODS = """
    abs absolute acos add addcdiv addcmul all amax amin aminmax any arccos arcsin arctan argmax
    argmin argsort asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor bmm broadcast_to
    ceil chunk clamp clamp_max clamp_min clip clone copysign cos cosh count_nonzero cummax cummin
    cumprod cumsum deg2rad detach diagonal diff div divide dot eq erf erfc erfinv exp exp2 expm1
    fix flatten flip fliplr flipud floor floor_divide fmax fmin fmod frac gather ge greater
    greater_equal gt heaviside hypot index_select isclose isfinite isinf isnan isneginf isposinf
    kthvalue le lerp less less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2
    logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill
    masked_select matmul max maximum mean median min minimum mm movedim mul multiply mv nan_to_num
    nanmean nanmedian nansum narrow ne neg negative norm not_equal outer permute pow prod quantile
    rad2deg ravel reciprocal relu remainder reshape roll round rsqrt scatter scatter_add select sgn
    sigmoid sign sin sinc sinh softmax sort split sqrt square squeeze std sub subtract sum swapaxes
    swapdims t take_along_dim tan tanh tile topk trace transpose tril triu true_divide trunc unbind
    unflatten unsqueeze var xlogy
"""
SHARED_METHODS = frozenset(_SHARED_METHODS.split())

_TENSOR_METHODS = """
    bfloat16 bool contiguous cpu cuda dim double expand expand_as float half index_add index_fill
    int is_floating_point long ndimension nelement new_full new_ones new_zeros numel repeat
    repeat_interleave reshape_as size to type_as view view_as where
"""

METHODS = frozenset([*SHARED_METHODS, *_TENSOR_METHODS.split()])
ATTRIBUTES = frozenset(["T", "device", "dtype", "mT", "ndim", "shape"])
DTYPES = frozenset(["bfloat16", "bool", "float16", "float32", "float64", "int32", "int64"])
