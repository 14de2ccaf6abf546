/* What Python calls of packing.c and product.c. Threads take tasks as they get free; which of them
   computes what changes no bit. Every function returns 0, or -1 when there is no memory. */

#include "packing.h"
#include "product.h"

typedef struct {
  const packing_t *each;
  int64_t count;
  void (*panel)(const matrix_t *, int64_t, const void *, void *);
  atomic_long next; /* panel, of all matrices one after the other */
} packings_t;

static void pack_panels(team_t *team, int rank, void *argument) {
  (void)team, (void)rank;
  packings_t *all = argument;
  const packing_t *a = all->each, *end = a + all->count;
  int64_t first = 0; /* of `a` */
  for (;;) {
    int64_t panel = atomic_fetch_add(&all->next, 1);
    for (; a < end && panel - first >= panels_of(a->matrix.out); a++)
      first += panels_of(a->matrix.out);
    if (a == end) return;
    all->panel(&a->matrix, panel - first, a->from, a->to);
  }
}

/* An adapter has hundreds of small factors: one call for each would take longer than to pack them. */
void pack(team_t *team, const packing_t *each, int64_t count) {
  work(team, pack_panels, &(packings_t){each, count, pack_panel, 0});
}

void unpack(team_t *team, const packing_t *each, int64_t count) {
  work(team, pack_panels, &(packings_t){each, count, unpack_panel, 0});
}

/* Stages of one call: rows are rounded, then multiplied. */
typedef struct {
  product_t product;
  cut_t cut;
  const float *x; /* [rows][k], before they are rounded */
  narrow *rounded;
  int64_t rows, k;
  atomic_long next_row, next_task;
} call_t;

static void round_rows(call_t *a) {
  int64_t k = a->k, size = a->product.x_stride;
  for (int64_t r; (r = atomic_fetch_add(&a->next_row, 1)) < a->rows;) {
    write_numbers(1, a->rounded, r * size, a->x + r * k, k);
    memset(a->rounded + r * size + k, 0, (size_t)(size - k) * sizeof(narrow));
  }
}

static void multiply_tasks(call_t *a) {
  int64_t tasks = a->cut.panel_tasks * a->cut.row_tasks;
  for (int64_t task; (task = atomic_fetch_add(&a->next_task, 1)) < tasks;)
    multiply(&a->product, part_of(a->rows, a->cut.rows, task / a->cut.panel_tasks),
             part_of(panels_of(a->product.out), a->cut.panels, task % a->cut.panel_tasks));
}

static void run_product(team_t *team, int rank, void *argument) {
  (void)rank;
  call_t *a = argument;
  if (a->rounded) {
    round_rows(a);
    meet(team);
  }
  multiply_tasks(a);
}

static product_t product_of(const matrix_t *m, const float *x, const narrow *rounded) {
  return (product_t){.x = m->is_narrow ? (const void *)rounded : x,
                     .x_stride = m->width, .is_narrow = m->is_narrow, .k = m->width, .out = m->out,
                     .y_stride = m->out, .scale = 1.0f};
}

/* y [rows, out] = x w^T + bias; x [rows, k], rounded where weights are narrow; bias may be NULL. */
int product(team_t *team, int64_t is_narrow, int64_t out, int64_t k, int64_t width,
            const void *packed, int64_t rows, const float *x, const float *bias, float *y) {
  matrix_t matrix = {is_narrow, out, k, width};
  int64_t bytes = is_narrow ? rows * width * (int64_t)sizeof(narrow) : 1;
  narrow *rounded = scratch(team, (size_t)bytes);
  if (rounded == NULL) return -1;
  call_t call = {.product = product_of(&matrix, x, rounded), .x = x,
                 .rounded = is_narrow ? rounded : NULL, .rows = rows, .k = k,
                 .cut = cut_product(rows, is_narrow, width, out)};
  call.product.w = packed;
  call.product.bias = bias;
  call.product.y = y;
  work(team, run_product, &call);
  return 0;
}
