/* Products of a few rows for the gradient of attention (attention_gradient.c), and pairs of narrow
   numbers as these read them. */

#ifndef TINKERCLOUD_ATTENTION_PRODUCTS_H
#define TINKERCLOUD_ATTENTION_PRODUCTS_H

#include <stdint.h>

#include "narrow.h"
#include "pairs.h"
#include "vectors.h"

#define ROUND_UP(n, step) (((n) + (step)-1) / (step) * (step))

#define TILE_ROWS 6
#if LANES == 16
#define TILE_VECS 4
#else
#define TILE_VECS 2
#endif
#define PANEL (TILE_VECS * LANES)

#if !HAS_PAIRS
#define ADD_PAIRS(sum, a, b) ((void)0)
#endif

/* ---- products: c[i, n] += sum over k of a[i, k] b[k, n], or = where `fresh`

   A sum begins at zero and is added to c when it is whole: dK and dV of a sequence, which grow block
   by block, would lose more to rounding in one chain over all of its rows than PyTorch's do.

   a and b are words: floats, or pairs of narrow numbers, of k = 0 and 1, 2 and 3, ... */

/* ROUNDED: floats that are narrow numbers, of each two the odd one first, as pairs are added. */
enum { FLOATS, PAIRS, ROUNDED };

typedef struct {
  float *at;
  int64_t row;
} out_t;

typedef struct {
  const float *at;
  int64_t row, column;
} left_t;

typedef struct {
  const float *at;
  int64_t row;
} right_t;

INLINE void tile(out_t c, left_t a, right_t b, int64_t depth, int vecs, int fresh, int kind) {
  vec sum[TILE_ROWS][TILE_VECS];
#pragma GCC unroll 8
  for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < vecs; j++) sum[i][j] = (vec){};
  for (int64_t step = 0; step < (kind == ROUNDED ? ROUND_UP(depth, 2) : depth); step++) {
    int64_t k = kind == ROUNDED ? step ^ 1 : step;
    if (kind == ROUNDED && k == depth) continue;
    vec right[TILE_VECS];
#pragma GCC unroll 8
    for (int j = 0; j < vecs; j++) right[j] = load(b.at + k * b.row + j * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < TILE_ROWS; i++) {
      vec left = all(a.at[i * a.row + k * a.column]);
#pragma GCC unroll 8
      for (int j = 0; j < vecs; j++)
        if (kind == PAIRS)
          ADD_PAIRS(sum[i][j], left, right[j]);
        else
          sum[i][j] = fused(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < TILE_ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < vecs; j++) {
      float *to = c.at + i * c.row + j * LANES;
      store(to, fresh ? sum[i][j] : load(to) + sum[i][j]);
    }
}

INLINE void any_panel(out_t c, left_t a, right_t b, int64_t rows, int64_t depth, int64_t columns,
                      int fresh, int kind) {
  for (int64_t i = 0; i < rows; i += TILE_ROWS) {
    out_t to = {c.at + i * c.row, c.row};
    left_t from = {a.at + i * a.row, a.row, a.column};
    switch (columns / LANES) {
      case 1: tile(to, from, b, depth, 1, fresh, kind); break;
      case 2: tile(to, from, b, depth, 2, fresh, kind); break;
#if TILE_VECS == 4
      case 3: tile(to, from, b, depth, 3, fresh, kind); break;
      case 4: tile(to, from, b, depth, 4, fresh, kind); break;
#endif
    }
  }
}

#define DEFINE_PANEL(NAME, KIND)                                                                   \
  static void NAME(out_t c, left_t a, right_t b, int64_t rows, int64_t depth, int64_t columns,     \
                   int fresh) {                                                                    \
    any_panel(c, a, b, rows, depth, columns, fresh, KIND);                                         \
  }

DEFINE_PANEL(panel_of_floats, FLOATS)
#if HAS_PAIRS
DEFINE_PANEL(panel_of_pairs, PAIRS)
DEFINE_PANEL(panel_of_rounded, ROUNDED)
#endif

/* rows: a multiple of TILE_ROWS. columns: at most PANEL, a multiple of LANES. depth: in words. */
static void panel(out_t c, left_t a, right_t b, int64_t rows, int64_t depth, int64_t columns,
                  int fresh, int kind) {
#if HAS_PAIRS
  if (kind != FLOATS) {
    unsigned control = begin_pairs();
    (kind == PAIRS ? panel_of_pairs : panel_of_rounded)(c, a, b, rows, depth, columns, fresh);
    end_pairs(control);
    return;
  }
#endif
  (void)kind;
  panel_of_floats(c, a, b, rows, depth, columns, fresh);
}

static void product(out_t c, left_t a, right_t b, int64_t rows, int64_t depth, int64_t columns,
                    int fresh, int kind) {
  for (int64_t n = 0; n < columns; n += PANEL)
    panel((out_t){c.at + n, c.row}, a, (right_t){b.at + n, b.row}, rows, depth,
          MIN(PANEL, columns - n), fresh, kind);
}

/* ---- pairs */

typedef uint32_t pair_t __attribute__((may_alias));
typedef narrow half_t __attribute__((may_alias));

/* Of two rows of floats: of each column a pair. */
static void pair_rows(const float *even, const float *odd, int64_t count, float *words) {
  pair_t *pairs = (pair_t *)words;
  for (int64_t i = 0; i < count; i++) pairs[i] = narrowed(even[i]) | (pair_t)narrowed(odd[i]) << 16;
}

/* Of one row: of each two columns a pair. count: even. */
static void pair_columns(const float *row, int64_t count, float *words) {
  half_t *numbers = (half_t *)words;
  for (int64_t i = 0; i < count; i++) numbers[i] = narrowed(row[i]);
}

#endif
