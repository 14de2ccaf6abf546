/* The row-wise parts of a decoder's training pass, for train_bindings.py, each in one pass over
   memory. Values are rounded where PyTorch's own steps round them, so that the log-probabilities of
   trainer and sampler agree; a gradient only at its end. A row is one thread's, so that no sum
   depends on their number. Numbers are float, or narrow where `is_narrow`; what is said to be float
   is so always. */

#include <math.h>
#include <string.h>

#include "narrow.h"
#include "team.h"
#include "vectors.h"

#define PIECE 512 /* numbers at once, a multiple of LANES */
#define ROWS_AT_ONCE 8

typedef struct rows {
  int64_t is_narrow, rows, width;
  void (*row)(const struct rows *, int64_t);
  const void *x, *y, *weight;
  const float *inverse, *cosine, *sine;
  void *out;
  float *sums;
  int64_t stride, heads;
  atomic_long next;
} rows_t;

/* As if it were written and read again. */
INLINE void round_off(const rows_t *a, float *x, int64_t count) {
  if (!a->is_narrow) return;
  for (int64_t i = 0; i < count; i++) x[i] = widen1(narrowed(x[i]));
}

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

/* ---- the norm: weight * round(x * inverse) */

static void scale_row(const rows_t *a, int64_t r) {
  float x[PIECE], weight[PIECE];
  for (int64_t d = 0; d < a->width; d += PIECE) {
    int64_t count = MIN(PIECE, a->width - d), at = r * a->width + d;
    read_numbers(a->is_narrow, a->x, at, x, count);
    read_numbers(a->is_narrow, a->weight, d, weight, count);
    for (int64_t i = 0; i < count; i++) x[i] *= a->inverse[r];
    round_off(a, x, count);
    for (int64_t i = 0; i < count; i++) x[i] *= weight[i];
    write_numbers(a->is_narrow, a->out, at, x, count);
  }
}

/* x and out [rows][width], weight [width]; inverse [rows]. */
void norm_scaled(team_t *team, int64_t is_narrow, int64_t rows, int64_t width, const void *x,
                 const float *inverse, const void *weight, void *out) {
  run(team, (rows_t){.is_narrow = is_narrow, .rows = rows, .width = width, .row = scale_row,
                     .x = x, .inverse = inverse, .weight = weight, .out = out});
}

/* d/dx of x * inverse: inverse * (g - x * inverse^2 * mean(g * x)), g = dy * weight. */
static void norm_back_row(const rows_t *a, int64_t r) {
  float x[PIECE], g[PIECE], weight[PIECE], into[PIECE];
  float inverse = a->inverse[r], along = 0.0f;
  for (int pass = 0; pass < 2; pass++) {
    vec dot = {};
    for (int64_t d = 0; d < a->width; d += PIECE) {
      int64_t count = MIN(PIECE, a->width - d), at = r * a->width + d;
      if (pass == 0 || a->width > PIECE) {
        read_numbers(a->is_narrow, a->x, at, x, count);
        read_numbers(a->is_narrow, a->y, at, g, count);
        read_numbers(a->is_narrow, a->weight, d, weight, count);
        for (int64_t i = 0; i < count; i++) g[i] *= weight[i];
      }
      if (pass == 0) {
        for (int64_t i = 0; i < count; i += LANES) dot += load(g + i) * load(x + i);
        continue;
      }
      read_numbers(a->is_narrow, a->out, at, into, count);
      for (int64_t i = 0; i < count; i++) into[i] += g[i] * inverse + x[i] * along;
      write_numbers(a->is_narrow, a->out, at, into, count);
    }
    if (pass == 0) along = -sum1(dot) * inverse * inverse * inverse / (float)a->width;
  }
}

/* into += the gradient of x; dy, x and into [rows][width], weight [width]; inverse [rows]. */
void norm_gradient(team_t *team, int64_t is_narrow, int64_t rows, int64_t width, const void *x,
                   const float *inverse, const void *weight, const void *dy, void *into) {
  run(team, (rows_t){.is_narrow = is_narrow, .rows = rows, .width = width, .row = norm_back_row,
                     .x = x, .inverse = inverse, .weight = weight, .y = dy, .out = into});
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
    read_numbers(a->is_narrow, a->x, at, gate, count);
    read_numbers(a->is_narrow, a->x, at + a->width, up, count);
    for (int64_t i = 0; i < count; i += LANES) {
      vec g = load(gate + i);
      store(gate + i, g * sigmoid(g));
    }
    round_off(a, gate, count);
    for (int64_t i = 0; i < count; i++) gate[i] *= up[i];
    write_numbers(a->is_narrow, a->out, r * a->width + d, gate, count);
  }
}

/* gates [rows][gate and up: 2 width]; product [rows][width]. */
void swiglu(team_t *team, int64_t is_narrow, int64_t rows, int64_t width, const void *gates,
            void *product) {
  run(team, (rows_t){.is_narrow = is_narrow, .rows = rows, .width = width, .row = gate_row,
                     .x = gates, .out = product});
}

static void gate_back_row(const rows_t *a, int64_t r) {
  float gate[PIECE], up[PIECE], dy[PIECE], active[PIECE], slope[PIECE];
  for (int64_t d = 0; d < a->width; d += PIECE) {
    int64_t count = MIN(PIECE, a->width - d), at = r * a->width + d, of_gate = 2 * r * a->width + d;
    read_numbers(a->is_narrow, a->x, of_gate, gate, count);
    read_numbers(a->is_narrow, a->x, of_gate + a->width, up, count);
    read_numbers(a->is_narrow, a->y, at, dy, count);
    for (int64_t i = 0; i < count; i += LANES) {
      vec g = load(gate + i), s = sigmoid(g);
      store(active + i, g * s);
      store(slope + i, s * (all(1.0f) + g * (all(1.0f) - s)));
    }
    for (int64_t i = 0; i < count; i++) {
      slope[i] *= dy[i] * up[i];
      dy[i] *= active[i];
    }
    write_numbers(a->is_narrow, a->out, of_gate, slope, count);
    write_numbers(a->is_narrow, a->out, of_gate + a->width, dy, count);
  }
}

/* gates and dgates [rows][gate and up: 2 width]; dproduct [rows][width]. */
void swiglu_gradient(team_t *team, int64_t is_narrow, int64_t rows, int64_t width,
                     const void *gates, const void *dproduct, void *dgates) {
  run(team, (rows_t){.is_narrow = is_narrow, .rows = rows, .width = width, .row = gate_back_row,
                     .x = gates, .y = dproduct, .out = dgates});
}

/* ---- rotary positions */

static void rotate_row(const rows_t *a, int64_t r) {
  int64_t half = a->width / 2;
  float cosine[PIECE], sine[PIECE], first[PIECE], second[PIECE], product[PIECE];
  for (int64_t d = 0; d < half; d += PIECE) {
    int64_t count = MIN(PIECE, half - d);
    memcpy(cosine, a->cosine + r * half + d, (size_t)count * sizeof *cosine);
    memcpy(sine, a->sine + r * half + d, (size_t)count * sizeof *sine);
    round_off(a, cosine, count);
    round_off(a, sine, count);
    for (int64_t h = 0; h < a->heads; h++) {
      int64_t at = r * a->stride + h * a->width + d;
      read_numbers(a->is_narrow, a->out, at, first, count);
      read_numbers(a->is_narrow, a->out, at + half, second, count);
      float crossed[PIECE], turned[PIECE];
      for (int64_t i = 0; i < count; i++) {
        product[i] = first[i] * cosine[i];
        crossed[i] = second[i] * sine[i];
      }
      round_off(a, product, count);
      round_off(a, crossed, count);
      for (int64_t i = 0; i < count; i++) turned[i] = product[i] - crossed[i];
      for (int64_t i = 0; i < count; i++) {
        product[i] = second[i] * cosine[i];
        crossed[i] = first[i] * sine[i];
      }
      round_off(a, product, count);
      round_off(a, crossed, count);
      for (int64_t i = 0; i < count; i++) second[i] = product[i] + crossed[i];
      write_numbers(a->is_narrow, a->out, at, turned, count);
      write_numbers(a->is_narrow, a->out, at + half, second, count);
    }
  }
}

/* In place: x [rows][heads][head_dim], a row every `stride` numbers; cosine and sine
   [rows][head_dim / 2]. */
void rotate(team_t *team, int64_t is_narrow, int64_t rows, int64_t heads, int64_t head_dim,
            int64_t stride, void *x, const float *cosine, const float *sine) {
  run(team, (rows_t){.is_narrow = is_narrow, .rows = rows, .width = head_dim, .row = rotate_row,
                     .heads = heads, .stride = stride, .out = x, .cosine = cosine, .sine = sine});
}

/* ---- the softmax: exp(logit - log of the sum of exps), sums of pieces in float64 (scan.c) */

static void soften_row(const rows_t *a, int64_t r) {
  float piece[PIECE], *probabilities = (float *)a->out + r * a->width, top = -INFINITY;
  for (int64_t d = 0; d < a->width; d += PIECE) {
    int64_t count = MIN(PIECE, a->width - d);
    read_numbers(a->is_narrow, a->x, r * a->width + d, piece, count);
    top = MAX(top, largest(piece, count));
    memcpy(probabilities + d, piece, (size_t)count * sizeof *probabilities);
  }
  double sum = 0.0;
  for (int64_t d = 0; d < a->width; d += PIECE) {
    int64_t count = MIN(PIECE, a->width - d);
    vec part = {};
    memcpy(piece, probabilities + d, (size_t)count * sizeof *probabilities);
    for (int64_t i = count; i % LANES; i++) piece[i] = -INFINITY;
    for (int64_t i = 0; i < count; i += LANES) {
      vec e = exp_vec(load(piece + i) - all(top));
      part += e;
      store(piece + i, e);
    }
    memcpy(probabilities + d, piece, (size_t)count * sizeof *probabilities);
    sum += sum1(part);
  }
  a->sums[r] = (float)(top + log(sum));
  float inverse = (float)(1.0 / sum);
  for (int64_t d = 0; d < a->width; d++) probabilities[d] *= inverse;
}

/* logits [rows][width], which may be where the probabilities [rows][width], float, are written;
   normalizers [rows], float: the log of the sum of exps. */
void softmax(team_t *team, int64_t is_narrow, int64_t rows, int64_t width, const void *logits,
             float *probabilities, float *normalizers) {
  run(team, (rows_t){.is_narrow = is_narrow, .rows = rows, .width = width, .row = soften_row,
                     .x = logits, .out = probabilities, .sums = normalizers});
}
