/* What is asked of attention_gradient.c and linear_gradient.c; structures.py mirrors it. */

#ifndef TINKERCLOUD_GRADIENTS_H
#define TINKERCLOUD_GRADIENTS_H

#include <stdint.h>

#include "team.h"
#include "vectors.h"

/* Sequence s has the entries from starts[s] up to starts[s + 1], each a row of q, k, v and dout,
   which several sequences may share, and a row of its own of dq, dk and dv. Row r of a tensor begins
   at r times its stride in numbers; q, k and v are float, or narrow where `is_narrow`. */
typedef struct {
  int64_t is_narrow, num_sequences, heads, kv_heads, head_dim;
  int64_t window;   /* as in network.h, and cap */
  float scale, cap;
  const void *q, *k, *v;
  const float *dout;
  int64_t q_stride, k_stride, v_stride, dout_stride;
  float *dq, *dk, *dv;
  int64_t dq_stride, dk_stride, dv_stride;
  const int64_t *starts, *rows, *out_rows; /* of entries, but for starts */
  const uint8_t *owned; /* by entry: whether dout is its own, not zero; NULL: of all */
} attention_gradient_t;

/* One of some modules that read the same rows. */
typedef struct {
  const void *weight;         /* packed [out, in] */
  int64_t out, width, column; /* width: as of linear_t; column: of dy, the module's first */
} module_gradient_t;

/* One module's adapter, row-major: a [rank][in], b [out][rank]; NULL: this module has none. Its
   gradients are added to da and db. */
typedef struct {
  const float *a, *b;
  float *da, *db;
} lora_gradient_t;

/* Rows first..first+count-1 have read one adapter. */
typedef struct {
  int64_t first, count, rank;
  float scale;
  const lora_gradient_t *modules;
} segment_gradient_t;

/* Where rows of dy are those of a log-probability's gradient, g (onehot - softmax), summed over the
   row's targets. */
typedef struct {
  const double *norms; /* [rows] log of the sum of exp(logit); NULL: probabilities are given */
  const float *totals; /* [rows] sum of g over the row's targets */
  const int64_t *starts, *ids; /* [rows + 1] a row's first target; of each target */
  const float *gradients;      /* g of each target */
} softmax_gradient_t;

typedef struct {
  int64_t is_narrow, activation, rows, in, num_modules; /* activation: of gates (network.h) */
  const module_gradient_t *modules;
  const float *x;      /* [rows][in]; or NULL, and */
  const void *x_gates; /* numbers [rows][gate and up: 2 in], whose gated product was read */
  const float *dy;     /* a row every dy_row numbers */
  int64_t dy_row;
  /* What makes dy something else, or NULL. softmax: logits of the one module. dy_gates: numbers
     [rows][gate and up: 2 F]; dy [rows][F] is the gradient of their gated product, gate and up being what
     the two modules have put out. */
  const softmax_gradient_t *softmax;
  const void *dy_gates;
  float *dx; /* out: [rows][in], or NULL */
  int64_t num_segments;
  const segment_gradient_t *segments; /* ascending, disjoint */
} linear_gradient_t;

/* ---- train_rows.c: some columns of one row. numbers [rows][gate and up: 2 width]. */

typedef struct {
  int64_t is_narrow, activation, width;
  const void *numbers;
} gates_t;

/* The activation of gate, times up. */
INTERNAL void gate_part(const gates_t *gates, int64_t row, range_t columns, float *out);

/* The gradients of gate and of up, either of which may be NULL; dproduct [rows][width]: that of their
   product. */
INTERNAL void gate_gradient_part(const gates_t *gates, int64_t row, range_t columns,
                                 const float *dproduct, float *dgate, float *dup);

#endif
