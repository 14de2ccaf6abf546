/* A product by tiles: some rows and some columns, whose sums stay in registers, with the weights as
   they lie in memory.

   The order of a sum is that of DEFINE_TILE's loop for every number of rows and columns: one vector
   of partial sums for each output, which takes the inputs step by step, then sum4's tree. Tiles of
   other sizes differ in how many such sums they hold at once, and in nothing else. So is a sum that
   is cut into chunks of inputs: its vector is put down and taken up again unchanged. */

#ifndef TINKERCLOUD_TILES_H
#define TINKERCLOUD_TILES_H

#include "narrow.h"
#include "operands.h"
#include "vectors.h"

#if LANES == 16 /* 32 registers */
#define TILE_ROWS 6
#define GROUP_COLUMNS 16 /* that rows meet while they are in the first-level cache */
#else
#define TILE_ROWS 3
#define GROUP_COLUMNS 4
#endif
#define TILE_COLUMNS 4
#define AHEAD_BYTES 8192 /* between the columns that are read and those asked for */
#define ROW_BLOCK 96     /* rows that columns meet before the next do: second-level cache */

/* What a tile computes with: rows of x, and columns of y, which are rows of w. */
typedef struct {
  const void *x;
  int64_t x_stride;
  const void *w;
  int64_t w_stride, k;
  vec *sums;  /* [row][column], NULL: from zero */
  float *out; /* [row][SOME_COLUMNS], NULL: back to sums */
  vec *keep;  /* where to, then */
  /* What is read later, so that it is on its way: of each TILE_COLUMNS cache lines behind `later`
     every `step`th from `first` on. In the order of memory, which its own prefetching then follows;
     a column after another's line, as they are read, it does not. */
  const char *later;
  int64_t first, step;
} tile_t;

/* The first `count` of LANES floats, and zeros. */
INLINE vec load_some(const float *p, int64_t count) {
  vec v = {};
  for (int64_t i = 0; i < count; i++) v[i] = p[i];
  return v;
}

#define ADD_PRODUCTS(ROWS, COLUMNS, VECTOR, LOAD, ADD)                                             \
  do {                                                                                             \
    VECTOR left[ROWS];                                                                             \
    EACH(r, ROWS) {                                                                                \
      left[r] = LOAD(x + r * xs);                                                                  \
      IN_REGISTER(left[r]);                                                                        \
    }                                                                                              \
    EACH(c, COLUMNS) {                                                                             \
      VECTOR right = LOAD(w + c * ws);                                                             \
      if (ROWS > 1) IN_REGISTER(right);                                                            \
      EACH(r, ROWS) ADD(a[r][c], left[r], right);                                                  \
    }                                                                                              \
  } while (0)

#define LOAD_REST(p) load_some(p, k - i)
#define LOAD_NARROW_REST(p) load_some_narrow(p, k - i)

#define ALONE __attribute__((noinline)) /* the registers are all needed */

#define DEFINE_TILE(NAME, NUMBER, STEP, VECTOR, LOAD, REST, ADD, ROWS, COLUMNS)                    \
  static ALONE void NAME##_##ROWS##_##COLUMNS(const tile_t *t) {                                   \
    const NUMBER *x = t->x, *w = t->w;                                                             \
    int64_t xs = t->x_stride, ws = t->w_stride, k = t->k, i = 0;                                   \
    vec a[ROWS][COLUMNS] = {};                                                                     \
    if (t->sums) EACH(r, ROWS) EACH(c, COLUMNS) a[r][c] = t->sums[r * COLUMNS + c];                \
    for (; i + STEP <= k; i += STEP, x += STEP, w += STEP) {                                       \
      int64_t line = i * (int64_t)sizeof(NUMBER);                                                  \
      if (line % LINE_BYTES == 0)                                                                  \
        for (int64_t n = t->first; n < TILE_COLUMNS; n += t->step)                                 \
          __builtin_prefetch(t->later + line * TILE_COLUMNS + n * LINE_BYTES, 0, 2);               \
      ADD_PRODUCTS(ROWS, COLUMNS, VECTOR, LOAD, ADD);                                              \
    }                                                                                              \
    if (i < k) ADD_PRODUCTS(ROWS, COLUMNS, VECTOR, REST, ADD);                                     \
    if (!t->out) {                                                                                 \
      EACH(r, ROWS) EACH(c, COLUMNS) t->keep[r * COLUMNS + c] = a[r][c];                           \
    } else {                                                                                       \
      EACH(r, ROWS) sum4(a[r][0], a[r][1], a[r][2], a[r][3], t->out + r * SOME_COLUMNS);           \
    }                                                                                              \
  }

/* One row alone waits for memory only: its columns come one after the other, as they lie there, and
   the processor begins a column while the sum of the one before it is underway. */
#define DEFINE_ROW(NAME, NUMBER, STEP, VECTOR, LOAD, REST, ADD)                                    \
  INLINE vec NAME##_column(const NUMBER *x, const NUMBER *w, int64_t k) {                          \
    vec a = {};                                                                                    \
    int64_t i = 0;                                                                                 \
    for (; i + STEP <= k; i += STEP, x += STEP, w += STEP) {                                       \
      VECTOR left = LOAD(x), right = LOAD(w);                                                      \
      ADD(a, left, right);                                                                         \
    }                                                                                              \
    if (i < k) {                                                                                   \
      VECTOR left = REST(x), right = REST(w);                                                      \
      ADD(a, left, right);                                                                         \
    }                                                                                              \
    return a;                                                                                      \
  }                                                                                                \
  static ALONE void NAME##_one(const tile_t *t) { *t->out = sum1(NAME##_column(t->x, t->w, t->k)); } \
  static ALONE void NAME##_four(const tile_t *t) {                                                 \
    const NUMBER *w = t->w;                                                                        \
    int64_t k = t->k;                                                                              \
    vec a = NAME##_column(t->x, w, k), b = NAME##_column(t->x, w + k, k);                          \
    vec c = NAME##_column(t->x, w + 2 * k, k), d = NAME##_column(t->x, w + 3 * k, k);              \
    sum4(a, b, c, d, t->out);                                                                      \
  }

typedef void run_tile_t(const tile_t *);

/* one, four: a row and that many columns; some: 1 to TILE_ROWS rows and TILE_COLUMNS columns. */
typedef struct {
  run_tile_t *one, *four, *some[TILE_ROWS];
  int64_t bytes; /* of a number */
} tiles_t;

#if TILE_ROWS == 6
#define MORE_ROWS(DEFINE, ...)                                                                     \
  DEFINE(__VA_ARGS__, 4, 4) DEFINE(__VA_ARGS__, 5, 4) DEFINE(__VA_ARGS__, 6, 4)
#define MORE_NAMES(NAME) , NAME##_4_4, NAME##_5_4, NAME##_6_4
#else
#define MORE_ROWS(DEFINE, ...)
#define MORE_NAMES(NAME)
#endif

#define DEFINE_TILES(NAME, NUMBER, ...)                                                            \
  DEFINE_ROW(NAME, NUMBER, __VA_ARGS__)                                                            \
  DEFINE_TILE(NAME, NUMBER, __VA_ARGS__, 1, 4)                                                     \
  DEFINE_TILE(NAME, NUMBER, __VA_ARGS__, 2, 4)                                                     \
  DEFINE_TILE(NAME, NUMBER, __VA_ARGS__, 3, 4)                                                     \
  MORE_ROWS(DEFINE_TILE, NAME, NUMBER, __VA_ARGS__)                                                \
  static const tiles_t NAME = {                                                                    \
      NAME##_one,                                                                                  \
      NAME##_four,                                                                                 \
      {NAME##_1_4, NAME##_2_4, NAME##_3_4 MORE_NAMES(NAME)},                                       \
      sizeof(NUMBER)};

DEFINE_TILES(wide_tiles, float, LANES, vec, load, LOAD_REST, ADD_PRODUCT)
DEFINE_TILES(narrow_tiles, narrow, NARROW_STEP, narrow_vec, load_narrow, LOAD_NARROW_REST, ADD_NARROW)

static const tiles_t *tiles_of(const product_t *p) {
  return p->is_narrow ? &narrow_tiles : &wide_tiles;
}

static void one_row(const product_t *p, int64_t row, range_t cols) {
  float out[SOME_COLUMNS];
  const tiles_t *tiles = tiles_of(p);
  tile_t t = {.x = number_at(p->x, row * p->x_stride, tiles->bytes), .k = p->k, .out = out};
  int64_t n = cols.first;
  for (; n + TILE_COLUMNS <= cols.end; n += TILE_COLUMNS) {
    t.w = number_at(p->w, n * p->k, tiles->bytes);
    tiles->four(&t);
    put(p, row, n, TILE_COLUMNS, out);
  }
  for (; n < cols.end; n++) {
    t.w = number_at(p->w, n * p->k, tiles->bytes);
    tiles->one(&t);
    put(p, row, n, 1, out);
  }
}

/* Up to GROUP_COLUMNS columns from `col` on, rows from `row` on. */
static void some_rows(const product_t *p, int64_t row, int64_t rows, int64_t col, int64_t columns,
                      float *out) {
  static _Thread_local vec sums[GROUP_COLUMNS * ROW_BLOCK];
  const tiles_t *tiles = tiles_of(p);
  int64_t bytes = tiles->bytes, count = (rows + TILE_ROWS - 1) / TILE_ROWS;
  int64_t chunk = chunk_of(p->k, CHUNK * (int64_t)sizeof(float) / bytes);
  for (int64_t i = 0; i < p->k; i += chunk) {
    int last = i + chunk >= p->k;
    tile_t t = {
        .x_stride = p->x_stride, .w_stride = p->k, .k = MIN(chunk, p->k - i), .step = count};
    /* The tiles are as equal as can be: one of one row would wait for itself. */
    for (t.first = 0; t.first < count; t.first++) {
      int64_t first = rows * t.first / count, end = rows * (t.first + 1) / count;
      t.x = number_at(p->x, (row + first) * p->x_stride + i, bytes);
      for (int64_t c = 0; c < columns; c += TILE_COLUMNS) {
        const void *w = number_at(p->w, (col + c) * p->k, bytes);
        t.w = number_at(w, i, bytes);
        t.later = number_at(w, columns * p->k + TILE_COLUMNS * i, bytes) + AHEAD_BYTES;
        t.keep = sums + c * ROW_BLOCK + first * TILE_COLUMNS;
        t.sums = i ? t.keep : NULL;
        t.out = last ? out + first * SOME_COLUMNS + c : NULL;
        tiles->some[end - first - 1](&t);
      }
    }
  }
}

#endif
