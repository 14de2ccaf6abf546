/* Matrix products whose every output is computed in the same order, however many rows there are. */

#ifndef TINKERCLOUD_PRODUCT_H
#define TINKERCLOUD_PRODUCT_H

#include "team.h"
#include "vectors.h"

/* y = x w^T: each output is one dot product in vector lanes, then their sum. */

/* Dot products of ROWS rows of x with COLS rows of w into sums[r * COLS + c]. */
#define DEFINE_TILE(ROWS, COLS)                                                                \
  static void tile_##ROWS##x##COLS(const float *x, int64_t xs, const float *w, int64_t ws,     \
                                   int64_t k, float *sums) {                                   \
    vec acc[ROWS][COLS] = {};                                                                  \
    int64_t i = 0;                                                                             \
    for (; i + LANES <= k; i += LANES) {                                                       \
      vec a[ROWS];                                                                             \
      _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) a[r] = load(x + r * xs + i);      \
      _Pragma("GCC unroll 8") for (int c = 0; c < COLS; c++) {                                 \
        vec b = load(w + c * ws + i);                                                          \
        _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) acc[r][c] += a[r] * b;          \
      }                                                                                        \
    }                                                                                          \
    for (int r = 0; r < ROWS; r++) {                                                           \
      _Pragma("GCC unroll 8") for (int c = 0; c < COLS; c += 4)                                \
        sum4(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3], sums + r * COLS + c);     \
      for (int64_t j = i; j < k; j++)                                                          \
        for (int c = 0; c < COLS; c++) sums[r * COLS + c] += x[r * xs + j] * w[c * ws + j];    \
    }                                                                                          \
  }

DEFINE_TILE(1, 8)
DEFINE_TILE(1, 4)
DEFINE_TILE(2, 4)
DEFINE_TILE(3, 4)

static float dot(const float *x, const float *w, int64_t k) {
  vec acc = {};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) acc += load(x + i) * load(w + i);
  float sum = sum1(acc);
  for (; i < k; i++) sum += x[i] * w[i];
  return sum;
}

typedef struct {
  const float *x;
  int64_t x_stride, rows;
  const float *w;
  int64_t k;
  const float *bias; /* or NULL */
  float *y;
  int64_t y_stride;
  int add;     /* y += scale * sum, instead of y = sum + bias */
  float scale;
} product_t;

INLINE void put(const product_t *p, int64_t row, int64_t col, const float *sums, int count) {
  float *y = p->y + row * p->y_stride + col;
  for (int c = 0; c < count; c++) {
    if (p->add)
      y[c] += p->scale * sums[c];
    else
      y[c] = p->bias ? sums[c] + p->bias[col + c] : sums[c];
  }
}

static void one_row(const product_t *p, int64_t row, range_t cols) {
  const float *x = p->x + row * p->x_stride;
  float sums[8];
  int64_t n = cols.first;
  for (; n + 8 <= cols.end; n += 8) {
    tile_1x8(x, 0, p->w + n * p->k, p->k, p->k, sums);
    put(p, row, n, sums, 8);
  }
  for (; n + 4 <= cols.end; n += 4) {
    tile_1x4(x, 0, p->w + n * p->k, p->k, p->k, sums);
    put(p, row, n, sums, 4);
  }
  for (; n < cols.end; n++) {
    sums[0] = dot(x, p->w + n * p->k, p->k);
    put(p, row, n, sums, 1);
  }
}

static void some_rows(const product_t *p, int64_t row, int rows, range_t cols) {
  const float *x = p->x + row * p->x_stride;
  float sums[12];
  int64_t n = cols.first;
  for (; n + 4 <= cols.end; n += 4) {
    if (rows == 3)
      tile_3x4(x, p->x_stride, p->w + n * p->k, p->k, p->k, sums);
    else
      tile_2x4(x, p->x_stride, p->w + n * p->k, p->k, p->k, sums);
    for (int r = 0; r < rows; r++) put(p, row + r, n, sums + 4 * r, 4);
  }
  for (int r = 0; r < rows; r++) one_row(p, row + r, (range_t){n, cols.end});
}

#define BLOCK_BYTES (128 * 1024) /* of w, that stay in the second-level cache */

static int64_t block_width(int64_t k) {
  int64_t width = BLOCK_BYTES / (k * (int64_t)sizeof(float)) / 16 * 16;
  return MAX(width, 16);
}

/* The columns `cols` of the product, all rows. */
static void multiply(const product_t *p, range_t cols) {
  int64_t width = block_width(p->k);
  for (int64_t n = cols.first; n < cols.end; n += width) {
    range_t block = {n, MIN(n + width, cols.end)};
    int64_t row = 0;
    for (; row + 3 <= p->rows; row += 3) some_rows(p, row, 3, block);
    if (p->rows - row == 2) some_rows(p, row, 2, block);
    if (p->rows - row == 1) one_row(p, row, block);
  }
}

#endif
