/* The row-wise parts of the backward half of a training pass, for train_bindings.py, each in one
   pass over memory. What the compiled forward pass (forward.c) has kept is read as it lies there,
   numbers in the model's type; everything else is float, and rounded only where a product has read
   rounded inputs. A row is one thread's, so that no sum depends on their number. */

#include <math.h>
#include <string.h>

#include "narrow.h"
#include "pass.h"
#include "team.h"
#include "vectors.h"

#define PIECE 512 /* numbers at once, a multiple of LANES */
#define ROWS_AT_ONCE 8

typedef struct rows {
  int64_t is_narrow, rows, width;
  void (*row)(const struct rows *, int64_t);
  const float *x, *dy, *weight, *cosine, *sine;
  const void *gates;
  const double *norms;
  float *inverse, *out;
  float eps;
  int64_t stride, heads;
  atomic_long next;
} rows_t;

static void run_rows(team_t *team, int rank, void *argument) {
  (void)team, (void)rank;
  rows_t *a = argument;
  for (;;) {
    int64_t first = atomic_fetch_add(&a->next, ROWS_AT_ONCE);
    if (first >= a->rows) return;
    for (int64_t r = first; r < MIN(first + ROWS_AT_ONCE, a->rows); r++) a->row(a, r);
  }
}

static void run(team_t *team, rows_t a) {
  atomic_store(&a.next, 0);
  work(team, run_rows, &a);
}

/* As a product has read it. */
INLINE void round_off(const rows_t *a, float *x, int64_t count) {
  if (!a->is_narrow) return;
  for (int64_t i = 0; i < count; i++) x[i] = widen1(narrowed(x[i]));
}

/* ---- the norm */

static void norm_row(const rows_t *a, int64_t r) {
  const float *x = a->x + r * a->width;
  float *out = a->out + r * a->width;
  a->inverse[r] = inverse_norm(x, a->width, a->eps);
  rms_norm(x, a->weight, a->width, a->eps, out);
  round_off(a, out, a->width);
}

/* x and out [rows][width], weight [width]; inverse [rows]: what rows were multiplied with. out: as
   the products of the forward pass have read it. */
void norm(team_t *team, int64_t is_narrow, int64_t rows, int64_t width, const float *x,
          const float *weight, float eps, float *out, float *inverse) {
  run(team, (rows_t){.is_narrow = is_narrow, .rows = rows, .width = width, .row = norm_row,
                     .x = x, .weight = weight, .eps = eps, .out = out, .inverse = inverse});
}

/* d/dx of x * inverse: inverse * (g - x * inverse^2 * mean(g * x)), g = dy * weight. */
static void norm_back_row(const rows_t *a, int64_t r) {
  const float *x = a->x + r * a->width, *dy = a->dy + r * a->width;
  float *into = a->out + r * a->width, inverse = a->inverse[r];
  vec sums = {};
  int64_t i = 0;
  for (; i + LANES <= a->width; i += LANES) sums += load(dy + i) * load(a->weight + i) * load(x + i);
  float sum = sum1(sums);
  for (; i < a->width; i++) sum += dy[i] * a->weight[i] * x[i];
  float along = -sum * inverse * inverse * inverse / (float)a->width;
  for (i = 0; i < a->width; i++) into[i] += dy[i] * a->weight[i] * inverse + x[i] * along;
}

/* into += the gradient of x; dy, x and into [rows][width], weight [width]; inverse [rows]. */
void norm_gradient(team_t *team, int64_t rows, int64_t width, const float *x, float *inverse,
                   const float *weight, const float *dy, float *into) {
  run(team, (rows_t){.rows = rows, .width = width, .row = norm_back_row, .x = x,
                     .inverse = inverse, .weight = weight, .dy = dy, .out = into});
}

/* ---- the gate: silu(gate) * up */

INLINE vec sigmoid(vec x) {
  vec down = -x;
  ivec large = down > all(87.0f);
  vec e = exp_vec((vec)(((ivec)down & ~large) | ((ivec)all(87.0f) & large)));
  return all(1.0f) / (all(1.0f) + e);
}

static void gate_row(const rows_t *a, int64_t r) {
  float gate[PIECE], up[PIECE];
  for (int64_t d = 0; d < a->width; d += PIECE) {
    int64_t count = MIN(PIECE, a->width - d), at = 2 * r * a->width + d;
    read_numbers(a->is_narrow, a->gates, at, gate, count);
    read_numbers(a->is_narrow, a->gates, at + a->width, up, count);
    for (int64_t i = 0; i < count; i += LANES) {
      vec g = load(gate + i);
      store(gate + i, g * sigmoid(g) * load(up + i));
    }
    round_off(a, gate, count);
    memcpy(a->out + r * a->width + d, gate, (size_t)count * sizeof(float));
  }
}

/* gates numbers [rows][gate and up: 2 width]; product [rows][width]. */
void swiglu(team_t *team, int64_t is_narrow, int64_t rows, int64_t width, const void *gates,
            float *product) {
  run(team, (rows_t){.is_narrow = is_narrow, .rows = rows, .width = width, .row = gate_row,
                     .gates = gates, .out = product});
}

static void gate_back_row(const rows_t *a, int64_t r) {
  float gate[PIECE], up[PIECE], dy[PIECE];
  for (int64_t d = 0; d < a->width; d += PIECE) {
    int64_t count = MIN(PIECE, a->width - d), at = 2 * r * a->width + d;
    read_numbers(a->is_narrow, a->gates, at, gate, count);
    read_numbers(a->is_narrow, a->gates, at + a->width, up, count);
    read_numbers(0, a->dy, r * a->width + d, dy, count);
    for (int64_t i = 0; i < count; i += LANES) {
      vec g = load(gate + i), s = sigmoid(g), slope = load(dy + i);
      store(gate + i, slope * load(up + i) * (s * (all(1.0f) + g * (all(1.0f) - s))));
      store(up + i, slope * (g * s));
    }
    memcpy(a->out + at, gate, (size_t)count * sizeof(float));
    memcpy(a->out + at + a->width, up, (size_t)count * sizeof(float));
  }
}

/* gates numbers and dgates [rows][gate and up: 2 width]; dproduct [rows][width]. */
void swiglu_gradient(team_t *team, int64_t is_narrow, int64_t rows, int64_t width,
                     const void *gates, const float *dproduct, float *dgates) {
  run(team, (rows_t){.is_narrow = is_narrow, .rows = rows, .width = width, .row = gate_back_row,
                     .gates = gates, .dy = dproduct, .out = dgates});
}

/* ---- rotary positions */

static void rotate_row(const rows_t *a, int64_t r) {
  int64_t half = a->width / 2;
  const float *cosine = a->cosine + r * half, *sine = a->sine + r * half;
  for (int64_t h = 0; h < a->heads; h++) {
    float *first = a->out + r * a->stride + h * a->width, *second = first + half;
    for (int64_t i = 0; i < half; i++) {
      float x = first[i], y = second[i];
      first[i] = x * cosine[i] - y * sine[i];
      second[i] = y * cosine[i] + x * sine[i];
    }
  }
}

/* In place: x [rows][heads][head_dim], a row every `stride` numbers; cosine and sine
   [rows][head_dim / 2]. */
void rotate(team_t *team, int64_t rows, int64_t heads, int64_t head_dim, int64_t stride, float *x,
            const float *cosine, const float *sine) {
  run(team, (rows_t){.rows = rows, .width = head_dim, .row = rotate_row, .heads = heads,
                     .stride = stride, .out = x, .cosine = cosine, .sine = sine});
}

/* ---- the softmax */

static void probabilities_row(const rows_t *a, int64_t r) {
  float *x = a->out + r * a->width, norm = (float)a->norms[r], rest[LANES];
  int64_t i = 0;
  for (; i + LANES <= a->width; i += LANES) store(x + i, exp_vec(load(x + i) - all(norm)));
  if (i == a->width) return;
  read_numbers(0, x, i, rest, a->width - i);
  store(rest, exp_vec(load(rest) - all(norm)));
  memcpy(x + i, rest, (size_t)(a->width - i) * sizeof *x);
}

/* In place: x [rows][width] becomes exp(x - its row's norm); norms [rows]. */
void probabilities(team_t *team, int64_t rows, int64_t width, float *x, const double *norms) {
  run(team, (rows_t){.rows = rows, .width = width, .row = probabilities_row, .out = x,
                     .norms = norms});
}
