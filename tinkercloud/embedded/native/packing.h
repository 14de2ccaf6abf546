/* Panels of a weight matrix from one form into another (packing.c). */

#ifndef TINKERCLOUD_PACKING_H
#define TINKERCLOUD_PACKING_H

#include "packed.h"

/* Of weights [out, k]. */
typedef struct {
  int64_t is_narrow, out, k;
} matrix_t;

INLINE int64_t number_bytes(int64_t is_narrow) {
  return is_narrow ? (int64_t)sizeof(narrow) : (int64_t)sizeof(float);
}

#define HIDDEN __attribute__((visibility("hidden")))

/* rows: the matrix, row-major. */
HIDDEN void pack_panel(const matrix_t *m, int64_t panel, const void *rows, void *packed);
HIDDEN void unpack_panel(const matrix_t *m, int64_t panel, const void *packed, void *rows);

/* 16 inputs, from `panel` * 16 on, of all outputs, as a panel of the transposed matrix [k, out]. */
HIDDEN void turn_panel(const matrix_t *m, int64_t panel, const void *packed, void *turned);

#endif
