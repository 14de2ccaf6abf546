/* Matrix products with packed weights (packed.h), y = x w^T. The inputs of an output go in ascending
   order, in bfloat16 by pairs: a chain of sums for each block of 64 inputs or pairs from the first
   one on, and the blocks' sums one after the other. One chain over all of them would lose more to
   rounding than PyTorch does. (AMX adds 16 pairs to a chain at a time, and so 64 times as many to one: amx/emulated.h.) Nothing of
   that depends on the number of rows, or on which rows and panels a call computes. */

#ifndef TINKERCLOUD_PRODUCT_H
#define TINKERCLOUD_PRODUCT_H

#include "packed.h"
#include "team.h"

typedef struct {
  const void *x;    /* float [rows][x_stride], or narrow where w is */
  int64_t x_stride; /* in numbers; narrow rows have zeros beyond k, up to a multiple of 32 */
  const void *w;    /* packed */
  const void *next; /* packed weights for as many inputs that the thread reads soon after; or NULL */
  int64_t is_narrow, k, out;
  const float *bias; /* of the outputs, or NULL */
  float *y;          /* [rows][y_stride] */
  int64_t y_stride;
  int add;     /* y += scale * (sum + bias), instead of y = sum + bias */
  float scale;
} product_t;

/* Some rows and some panels of a product, by one thread. */
typedef void rows_times_panels_t(const product_t *p, range_t rows, range_t panels);

__attribute__((visibility("hidden"))) rows_times_panels_t multiply;

#define ROW_BLOCK 128  /* rows that meet some panels before the next do: second-level cache */
#define BLOCK_STEPS 64 /* that one chain of sums has */

#define TASK_BYTES (192 * 1024) /* of w: what a thread takes at once where rows are few */
#define TASK_STEPS (1 << 18)    /* of a row with a panel: what it takes where they are many */
#define PRODUCT_ROWS 256
/* The same with AMX, which takes less time for each. */
#define TILE_TASK_STEPS (1 << 20)
#define TILE_PRODUCT_ROWS 512

/* A product cut into tasks: each some panels, of some rows. */
typedef struct {
  int64_t panels, rows;          /* of one task */
  int64_t panel_tasks, row_tasks;
} cut_t;

__attribute__((visibility("hidden"))) cut_t cut_product(int64_t rows, int64_t is_narrow, int64_t k,
                                                        int64_t out);

INLINE int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

INLINE range_t part_of(int64_t count, int64_t size, int64_t index) {
  return (range_t){index * size, MIN((index + 1) * size, count)};
}

/* A row's finished sums of some outputs into y: whole vectors, and what is left of them. */
INLINE void put_sums(const product_t *p, int64_t row, int64_t col, int64_t count,
                     const float *sums) {
  float *y = p->y + row * p->y_stride + col;
  const float *bias = p->bias ? p->bias + col : NULL;
  vec scale = all(p->scale);
  int64_t c = 0;
  if (p->add && bias)
    for (; c + LANES <= count; c += LANES)
      store(y + c, load(y + c) + scale * (load(sums + c) + load(bias + c)));
  else if (p->add)
    for (; c + LANES <= count; c += LANES) store(y + c, load(y + c) + scale * load(sums + c));
  else if (bias)
    for (; c + LANES <= count; c += LANES) store(y + c, load(sums + c) + load(bias + c));
  else
    for (; c + LANES <= count; c += LANES) store(y + c, load(sums + c));
  for (; c < count; c++) {
    float sum = bias ? sums[c] + bias[c] : sums[c];
    y[c] = p->add ? y[c] + p->scale * sum : sum;
  }
}

#endif
