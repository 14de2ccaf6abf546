/* What a matrix product reads and writes; tiles.h and strips.h compute it. */

#ifndef TINKERCLOUD_OPERANDS_H
#define TINKERCLOUD_OPERANDS_H

#include "narrow.h"
#include "vectors.h"

#define CHUNK 768 /* floats of an input that go together at most: first-level cache */
#define SOME_COLUMNS 16 /* whose results are put together: a cache line of y */

typedef struct {
  const void *x; /* float, or narrow as w is */
  int64_t x_stride, rows;
  const float *packed; /* the same rows by strips, or NULL */
  const void *w;
  int is_narrow;
  int64_t k;
  const float *bias; /* or NULL */
  float *y;
  int64_t y_stride;
  int add;     /* y += scale * sum, instead of y = sum + bias */
  float scale;
} product_t;

INLINE void put(const product_t *p, int64_t row, int64_t col, int64_t count, const float *sums) {
  float *y = p->y + row * p->y_stride + col;
  if (p->add)
    for (int64_t c = 0; c < count; c++) y[c] += p->scale * sums[c];
  else if (p->bias)
    for (int64_t c = 0; c < count; c++) y[c] = sums[c] + p->bias[col + c];
  else if (count == SOME_COLUMNS) /* in line, being of known size */
    memcpy(y, sums, SOME_COLUMNS * sizeof(float));
  else
    for (int64_t c = 0; c < count; c++) y[c] = sums[c];
}

/* Where k inputs are cut that go `most` together: as equal as can be, at ends of cache lines. */
static int64_t chunk_of(int64_t k, int64_t most) {
  int64_t chunks = (k + most - 1) / most, line = most / (CHUNK / LINE);
  return ((k + chunks - 1) / chunks + line - 1) / line * line;
}

#endif
