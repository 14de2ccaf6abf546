/* Panels of a weight matrix from one form into another (packing.c). */

#ifndef TINKERCLOUD_PACKING_H
#define TINKERCLOUD_PACKING_H

#include "packed.h"

/* Of weights [out, k], in panels of `width` inputs. */
typedef struct {
  int64_t is_narrow, out, k, width;
} matrix_t;

/* A matrix from one memory to another; structures.py mirrors both. */
typedef struct {
  matrix_t matrix;
  const void *from;
  void *to;
} packing_t;

INLINE int64_t number_bytes(int64_t is_narrow) {
  return is_narrow ? (int64_t)sizeof(narrow) : (int64_t)sizeof(float);
}

typedef uint32_t __attribute__((may_alias)) word_t;
typedef word_t block_t[PANEL][PANEL];

INLINE void turn_words(const block_t in, block_t out) {
  for (int i = 0; i < PANEL; i++)
    for (int j = 0; j < PANEL; j++) out[i][j] = in[j][i];
}

#define HIDDEN __attribute__((visibility("hidden")))

/* rows: the matrix, row-major. What a panel has beyond its k inputs becomes zero. */
HIDDEN void pack_panel(const matrix_t *m, int64_t panel, const void *rows, void *packed);
HIDDEN void unpack_panel(const matrix_t *m, int64_t panel, const void *packed, void *rows);

/* 16 inputs, from `panel` * 16 on, of all outputs, as a panel of the transposed matrix [k, out]. */
HIDDEN void turn_panel(const matrix_t *m, int64_t panel, const void *packed, void *turned);

/* `count` floats to numbers, and zeros up to a row_size. */
HIDDEN void round_row(int64_t is_narrow, const float *from, int64_t count, void *to);

/* Numbers [count][columns], rows `stride` bytes apart and each of a row_size. */
typedef struct {
  const char *at;
  int64_t stride, count, columns;
} rows_t;

/* Such rows as inputs of weights [columns, inputs], whose panels are `bytes` apart; the first row
   goes to `packed`, and in bfloat16 zeros follow the last one up to a whole NARROW_BLOCK. */
HIDDEN void pack_inputs(int64_t is_narrow, const rows_t *rows, char *packed, int64_t bytes);

#endif
