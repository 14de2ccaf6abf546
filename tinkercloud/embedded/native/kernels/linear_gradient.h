/* A call of linear_gradient.c: what it goes through, and where that lies. */

#ifndef TINKERCLOUD_LINEAR_GRADIENT_H
#define TINKERCLOUD_LINEAR_GRADIENT_H

#include "gradients.h"
#include "packing.h"
#include "product.h"

#define MOST_MODULES 3
#define PIECE 4096    /* outputs at once, of one module or of several whole ones */
#define BLOCK_ROWS 32 /* that a task makes ready; NARROW_BLOCK divides it */
#define TASK_PANELS 6 /* of an adapter's gradient, that a task computes */

/* Some outputs of a module. */
typedef struct {
  int64_t module, first, out;
  const char *weight; /* packed [N, D] */
  char *turned;       /* packed [D, N] */
  const char *dy;     /* numbers [T], a row every dy_stride of them */
  int64_t dy_stride;
  char *rounded; /* numbers [T]: where dy points unless the caller's rows will do */
} piece_t;

/* An adapter and its segment's rows. */
typedef struct {
  const segment_gradient_t *segment;
  int64_t width;        /* R */
  char *a_rows;         /* numbers [R][D] */
  char *a, *a_turned;   /* packed [R, D] and [D, R] */
  char *low, *dlow;     /* numbers [R][count]: A x, and scale dy B */
  char *x;              /* packed [D, count] */
  char *b_rows[MOST_MODULES], *b_turned[MOST_MODULES]; /* by piece: numbers [N][rank], [rank, N] */
  char *dy[MOST_MODULES];                              /* by piece: packed [N, count] */
} adapter_t;

typedef struct {
  int64_t first, count;
  adapter_t *adapter; /* or NULL */
} span_t;

typedef struct {
  const linear_gradient_t *g;
  piece_t pieces[MOST_MODULES];
  int num_pieces, is_first, is_last; /* of all pieces */
  adapter_t *adapters;               /* of each segment */
  span_t *spans;                     /* of all rows */
  int64_t num_spans, width;          /* width: most ranks side by side */
  char *x, *dlow_rows;               /* numbers [T][D], or NULL if the caller's do; [T][width] */
  float *dlow;                       /* [T][width] */
  float *own;                        /* of each thread */
  int64_t own_floats;
  atomic_long next[3 + MOST_MODULES + 1]; /* tasks of the stages; the last one has several kinds */
} call_t;

INLINE int64_t row_bytes(const call_t *c, int64_t k) {
  return row_size(c->g->is_narrow, k) * number_bytes(c->g->is_narrow);
}

INLINE char *row_of(const call_t *c, char *rows, int64_t row, int64_t k) {
  return rows + row * row_bytes(c, k);
}

/* ---- linear_gradient_memory.c. Memory is laid out twice: first from a `start` of NULL, to see how
   much that takes. */

typedef struct {
  char *start; /* or NULL */
  int64_t used;
} memory_t;

/* What all pieces share. */
INTERNAL void lay_out(call_t *c, int threads, memory_t *memory);

/* The next pieces from output `*first` of module `*module` on, which go on to those after them. */
INTERNAL void cut_pieces(call_t *c, int64_t *module, int64_t *first, memory_t *memory);

/* All rows, in spans with and without an adapter. */
INTERNAL void find_spans(call_t *c);

#endif
