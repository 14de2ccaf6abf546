/* Matrix products whose every output is computed in the same order, however many rows there are.

   y = x w^T. An output is LANES sums, added up in one tree (vectors.h): in float32 lane l adds the
   products of the inputs l, l + LANES, l + 2 LANES, ... one after the other, in bfloat16 what
   ADD_NARROW (narrow.h) says. Nothing of that depends on the number of rows, on which columns a
   call computes, or on where the inputs are cut. Two ways to the same bits: tiles.h and strips.h. */

#ifndef TINKERCLOUD_ROW_PRODUCT_H
#define TINKERCLOUD_ROW_PRODUCT_H

#include "operands.h"
#include "strips.h"
#include "team.h"
#include "tiles.h"

#define TASK_BYTES (192 * 1024)        /* of w */
#define WHOLE MAX(PANEL, SOME_COLUMNS) /* columns: multiples leave no rest */

/* How many columns a thread takes at once, of numbers of that many bytes. */
static int64_t task_columns(int64_t k, int64_t bytes) {
  int64_t columns = TASK_BYTES / (k * bytes);
  return MAX(columns / WHOLE, 1) * WHOLE;
}

/* The columns `cols` of the product, all rows. */
static void multiply(const product_t *p, range_t cols) {
  static _Thread_local float out[ROW_BLOCK * SOME_COLUMNS] __attribute__((aligned(64)));
  if (p->packed) {
    int64_t strips = strips_of(p->rows);
    for (int64_t strip = 0; strip < strips; strip += BLOCK_STRIPS)
      for (int64_t n = cols.first; n < cols.end; n += PANEL)
        some_strips(p, strip, MIN(BLOCK_STRIPS, strips - strip), n, MIN(PANEL, cols.end - n));
    return;
  }
  int64_t blocks = (p->rows + ROW_BLOCK - 1) / ROW_BLOCK;
  for (int64_t b = 0; b < blocks; b++) {
    int64_t row = p->rows * b / blocks, end = p->rows * (b + 1) / blocks, n = cols.first;
    for (int64_t count; end - row > 1 && n + TILE_COLUMNS <= cols.end; n += count) {
      count = MIN(SOME_COLUMNS, (cols.end - n) / TILE_COLUMNS * TILE_COLUMNS);
      for (int64_t c = 0; c < count; c += GROUP_COLUMNS)
        some_rows(p, row, end - row, n + c, MIN(GROUP_COLUMNS, count - c), out + c);
      for (int64_t r = row; r < end; r++) put(p, r, n, count, out + (r - row) * SOME_COLUMNS);
    }
    for (; row < end && n < cols.end; row++) one_row(p, row, (range_t){n, cols.end});
  }
}

#endif
