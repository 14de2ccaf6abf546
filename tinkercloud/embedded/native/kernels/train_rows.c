/* The row-wise parts of the backward half of a training pass, for train_bindings.py, each in one
   pass over memory. What the compiled forward pass (forward.c) has kept is read as it lies there,
   numbers in the model's type; everything else is float. A row is one thread's, so that no sum
   depends on their number. */

#include <math.h>
#include <string.h>

#include "activations.h"
#include "gradients.h"
#include "narrow.h"
#include "pass.h"
#include "rotary.h"
#include "team.h"
#include "vectors.h"

#define ROWS_AT_ONCE 8

typedef struct rows {
  int64_t is_narrow, rows, width;
  void (*row)(const struct rows *, int64_t);
  const float *x, *dy, *weight, *cosine, *sine;
  const void *gates;
  const double *norms;
  float *inverse, *out;
  float eps;
  int64_t stride, heads, activation, num_rotated, of_neighbours;
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

/* ---- the norm */

static void norm_row(const rows_t *a, int64_t r) {
  const float *x = a->x + r * a->width;
  a->inverse[r] = inverse_norm(x, a->width, a->eps);
  rms_norm(x, a->weight, a->width, a->eps, a->out + r * a->width);
}

/* x and out [rows][width], weight [width]; inverse [rows]: what rows were multiplied with. */
void norm(team_t *team, int64_t rows, int64_t width, const float *x, const float *weight, float eps,
          float *out, float *inverse) {
  run(team, (rows_t){.rows = rows, .width = width, .row = norm_row, .x = x, .weight = weight,
                     .eps = eps, .out = out, .inverse = inverse});
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

/* ---- the gate: gate * sigmoid(z) * up, with z of the gate (activations.h) */

INLINE vec sigmoid(vec x) { return all(1.0f) / (all(1.0f) + exp_of_negative(x)); }

void gate_part(const gates_t *g, int64_t row, range_t columns, float *out) {
  for (int64_t d = columns.first; d < columns.end; d += LANES) {
    int64_t count = columns.end - d, at = 2 * row * g->width + d;
    vec x = some_numbers(g->is_narrow, g->numbers, at, count);
    vec up = some_numbers(g->is_narrow, g->numbers, at + g->width, count);
    store_some(out + d - columns.first, x * sigmoid(gate_exponent(g->activation, x)) * up, count);
  }
}

static void gate_row(const rows_t *a, int64_t r) {
  gates_t gates = {a->is_narrow, a->activation, a->width, a->gates};
  gate_part(&gates, r, (range_t){0, a->width}, a->out + r * a->width);
}

/* gates numbers [rows][gate and up: 2 width]; product [rows][width]. */
void gated_product(team_t *team, int64_t is_narrow, int64_t activation, int64_t rows, int64_t width,
                   const void *gates, float *product) {
  run(team, (rows_t){.is_narrow = is_narrow, .activation = activation, .rows = rows,
                     .width = width, .row = gate_row, .gates = gates, .out = product});
}

void gate_gradient_part(const gates_t *g, int64_t row, range_t columns, const float *dproduct,
                        float *dgate, float *dup) {
  for (int64_t d = columns.first; d < columns.end; d += LANES) {
    int64_t count = columns.end - d, at = 2 * row * g->width + d;
    vec x = some_numbers(g->is_narrow, g->numbers, at, count);
    vec s = sigmoid(gate_exponent(g->activation, x));
    vec slope = some_numbers(0, dproduct, row * g->width + d, count);
    if (dup) store_some(dup + d - columns.first, slope * (x * s), count);
    if (dgate) {
      vec up = some_numbers(g->is_narrow, g->numbers, at + g->width, count);
      vec of_z = gate_exponent_slope(g->activation, x);
      vec gradient = slope * up * (s * (all(1.0f) + x * of_z * (all(1.0f) - s)));
      store_some(dgate + d - columns.first, gradient, count);
    }
  }
}

static void gate_back_row(const rows_t *a, int64_t r) {
  gates_t gates = {a->is_narrow, a->activation, a->width, a->gates};
  float *out = a->out + 2 * r * a->width;
  gate_gradient_part(&gates, r, (range_t){0, a->width}, a->dy, out, out + a->width);
}

/* gates numbers and dgates [rows][gate and up: 2 width]; dproduct [rows][width]. */
void gated_product_gradient(team_t *team, int64_t is_narrow, int64_t activation, int64_t rows,
                            int64_t width, const void *gates, const float *dproduct,
                            float *dgates) {
  run(team, (rows_t){.is_narrow = is_narrow, .activation = activation, .rows = rows,
                     .width = width, .row = gate_back_row, .gates = gates, .dy = dproduct,
                     .out = dgates});
}

/* ---- rotary positions */

static void rotate_row(const rows_t *a, int64_t r) {
  int64_t half = a->num_rotated / 2;
  const rotary_t rotary = {a->cosine + r * half, a->sine + r * half, half, a->of_neighbours};
  for (int64_t h = 0; h < a->heads; h++)
    rotate_head(&rotary, a->out + r * a->stride + h * a->width);
}

/* In place: x [rows][heads][head_dim], a row every `stride` numbers; cosine and sine
   [rows][num_rotated / 2]. */
void rotate(team_t *team, int64_t rows, int64_t heads, int64_t head_dim, int64_t stride, float *x,
            const float *cosine, const float *sine, int64_t num_rotated, int64_t of_neighbours) {
  run(team, (rows_t){.rows = rows, .width = head_dim, .row = rotate_row, .heads = heads,
                     .stride = stride, .out = x, .cosine = cosine, .sine = sine,
                     .num_rotated = num_rotated, .of_neighbours = of_neighbours});
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
