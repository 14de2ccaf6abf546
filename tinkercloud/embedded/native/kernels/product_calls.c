/* What Python calls of packing.c and product.c. Threads take tasks as they get free; which of them
   computes what changes no bit. Every function returns 0, or -1 when there is no memory. */

#include "packing.h"
#include "product.h"

#define ALONE_BYTES (256 * 1024) /* packed by one thread */

typedef struct {
  matrix_t matrix;
  const void *from;
  void *to;
  void (*panel)(const matrix_t *, int64_t, const void *, void *);
  atomic_long next;
} packing_t;

static void pack_panels(team_t *team, int rank, void *argument) {
  (void)team, (void)rank;
  packing_t *a = argument;
  for (int64_t panel; (panel = atomic_fetch_add(&a->next, 1)) < panels_of(a->matrix.out);)
    a->panel(&a->matrix, panel, a->from, a->to);
}

/* By this thread alone where there is little to do: an adapter has hundreds of small factors, and to
   wake the others for each took longer than to pack it. */
static void pack_all(team_t *team, packing_t *all) {
  const matrix_t *m = &all->matrix;
  if (panels_of(m->out) * panel_bytes(m->is_narrow, m->width) <= ALONE_BYTES)
    pack_panels(team, 0, all);
  else
    work(team, pack_panels, all);
}

void pack(team_t *team, int64_t is_narrow, int64_t out, int64_t k, int64_t width, const void *rows,
          void *packed) {
  pack_all(team, &(packing_t){{is_narrow, out, k, width}, rows, packed, pack_panel, 0});
}

void unpack(team_t *team, int64_t is_narrow, int64_t out, int64_t k, int64_t width,
            const void *packed, void *rows) {
  pack_all(team, &(packing_t){{is_narrow, out, k, width}, packed, rows, unpack_panel, 0});
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
