/* Matrix products whose every output is computed in the same order, however many rows there are.

   y = x w^T. An output is LANES sums, added up in one tree (vectors.h): in float32 lane l adds the
   products of the inputs l, l + LANES, l + 2 LANES, ... one after the other, in bfloat16 what
   `add_narrow` says. Nothing of that depends on the number of rows, on which columns a call
   computes, or on where the inputs are cut. Two ways to the same bits: tiles, which take the weights
   as they lie in memory; strips, which lay weights and rows out anew, for many rows in float32. */

#ifndef TINKERCLOUD_PRODUCT_H
#define TINKERCLOUD_PRODUCT_H

#include "narrow.h"
#include "team.h"
#include "vectors.h"

#define LINE 16  /* floats of a cache line */
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

static float dot(const float *x, const float *w, int64_t k) {
  vec acc = {};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) acc += load(x + i) * load(w + i);
  float sum = sum1(acc);
  for (; i < k; i++) sum += x[i] * w[i];
  return sum;
}

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

/* ---- tiles: some rows and some columns, whose sums stay in registers */

#if LANES == 16 /* 32 registers */
#define TILE_ROWS 6
#define GROUP_COLUMNS 16 /* that rows meet while they are in the first-level cache */
#else
#define TILE_ROWS 3
#define GROUP_COLUMNS 4
#endif
#define TILE_COLUMNS 4
#define LINE_BYTES 64
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

/* The compiler would load it again for every use, and add up elsewhere than in `sum`. */
#if defined(__FMA__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#define ADD_PRODUCT(sum, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b))
#else
#define IN_REGISTER(v) (void)0
#define ADD_PRODUCT(sum, a, b) ((sum) += (a) * (b))
#endif

#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

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

INLINE const char *number_at(const void *start, int64_t index, int64_t bytes) {
  return (const char *)start + index * bytes;
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

/* ---- strips: for many rows, the same sums in another order

   Here a vector holds columns instead of inputs, and each lane of inputs has its turn: weights and
   rows are laid out by lanes first, so that a core reads little at a time, again and again. */

#define STRIP 6           /* rows that go through a panel together: as registers allow */
#define STRIP_WIDTH 8     /* floats that they take of each input */
#define PANEL (2 * LANES) /* columns */
#define BLOCK_STRIPS 32   /* strips that meet a panel before the next does */
#if LANES == 16
#define MANY_ROWS INT64_MAX /* with twice the registers tiles are faster always */
#else
#define MANY_ROWS 48 /* from here on strips are faster */
#endif

#if defined(__AVX__)
INLINE __m256 two_halves(const float *low, const float *high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}

/* Eight rows of eight, turned around. */
INLINE void turn(const float *w, int64_t stride, __m256 out[8]) {
  _Pragma("GCC unroll 2") for (int half = 0; half < 8; half += 4) {
    __m256 r[4], s[4];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++)
        r[i] = two_halves(w + i * stride + half, w + (i + 4) * stride + half);
    s[0] = _mm256_unpacklo_ps(r[0], r[1]);
    s[1] = _mm256_unpackhi_ps(r[0], r[1]);
    s[2] = _mm256_unpacklo_ps(r[2], r[3]);
    s[3] = _mm256_unpackhi_ps(r[2], r[3]);
    out[half] = _mm256_shuffle_ps(s[0], s[2], 0x44);
    out[half + 1] = _mm256_shuffle_ps(s[0], s[2], 0xEE);
    out[half + 2] = _mm256_shuffle_ps(s[1], s[3], 0x44);
    out[half + 3] = _mm256_shuffle_ps(s[1], s[3], 0xEE);
  }
}
#endif

/* `count` rows turned around, `width` of them: out[lane][step][width], zeros beyond; step i of a
   lane is its i-th input. */
static void by_lanes(const float *rows, int64_t stride, int64_t count, int64_t k, int64_t steps,
                     int64_t width, float *out) {
#if defined(__AVX__)
  if (count >= width) {
    for (int64_t i = 0; i < k; i += 8)
      for (int64_t r = 0; r < width; r += 8) { /* whole cache lines of `out` */
        __m256 turned[8];
        turn(rows + r * stride + i, stride, turned);
        float *to = out + (i % LANES * steps + i / LANES) * width + r;
        EACH(j, 8) _mm256_storeu_ps(to + j * steps * width, turned[j]);
      }
    return;
  }
#endif
  for (int64_t r = 0; r < width; r++)
    for (int64_t i = 0; i < k; i++)
      out[(i % LANES * steps + i / LANES) * width + r] = r < count ? rows[r * stride + i] : 0.0f;
}

/* Whether a product goes by strips, and the floats that its rows then take. */
static int by_strips(int64_t rows, int64_t k) { return rows >= MANY_ROWS && k % LANES == 0; }

static int64_t strips_of(int64_t rows) { return (rows + STRIP - 1) / STRIP; }

static int64_t packed_size(int64_t rows, int64_t k) { return strips_of(rows) * STRIP_WIDTH * k; }

static void pack_strip(const float *x, int64_t x_stride, int64_t rows, int64_t k, int64_t strip,
                       float *packed) {
  by_lanes(x + strip * STRIP * x_stride, x_stride, rows - strip * STRIP, k, k / LANES, STRIP_WIDTH,
           packed + strip * STRIP_WIDTH * k);
}

/* sums[row][2] += one lane of a strip times that of a panel, `steps` inputs. */
static void strip_lane(const float *x, const float *panel, int64_t steps, vec *sums, int first) {
  vec a[STRIP][2] = {};
  if (!first) EACH(r, STRIP) a[r][0] = sums[2 * r], a[r][1] = sums[2 * r + 1];
  for (int64_t i = 0; i < steps; i++) {
    vec left = load(panel + i * PANEL), right = load(panel + i * PANEL + LANES);
    IN_REGISTER(left);
    IN_REGISTER(right);
    EACH(r, STRIP) {
      vec one = all(x[i * STRIP_WIDTH + r]);
      ADD_PRODUCT(a[r][0], one, left);
      ADD_PRODUCT(a[r][1], one, right);
    }
  }
  EACH(r, STRIP) sums[2 * r] = a[r][0], sums[2 * r + 1] = a[r][1];
}

/* What sum4 makes of the lanes of one vector, of LANES vectors, `apart` from one another. */
INLINE vec tree(const vec *lane, int64_t apart) {
  vec s[8];
#if LANES == 16
  EACH(i, 8) s[i] = lane[i * apart] + lane[(i + 8) * apart];
#else
  EACH(i, LANES) s[i] = lane[i * apart];
#endif
  vec four = (s[0] + s[1]) + (s[2] + s[3]);
#if LANES >= 8
  four += (s[4] + s[5]) + (s[6] + s[7]);
#endif
  return four;
}

/* Up to PANEL columns from `col` on, for some strips. */
static void some_strips(const product_t *p, int64_t strip, int64_t strips, int64_t col,
                        int64_t count) {
  static _Thread_local float panel[CHUNK * PANEL] __attribute__((aligned(64)));
  static _Thread_local vec sums[BLOCK_STRIPS][LANES][STRIP][2];
  const float *w = (const float *)p->w + col * p->k;
  const float *x = p->packed + strip * STRIP_WIDTH * p->k;
  int64_t chunk = chunk_of(p->k, CHUNK), all_steps = p->k / LANES;
  for (int64_t i = 0; i < p->k; i += chunk) {
    int64_t k = MIN(chunk, p->k - i), steps = k / LANES;
    by_lanes(w + i, p->k, count, k, steps, PANEL, panel);
    const float *next = i + chunk < p->k ? w + i + chunk : w + PANEL * p->k;
    for (int lane = 0; lane < LANES; lane++)
      for (int64_t s = 0, at = 0; s < strips; s++) {
        for (int64_t end = k * (s + 1) / strips; at < end; at += LINE)
          EACH(r, PANEL / LANES) __builtin_prefetch(next + (lane * 2 + r) * p->k + at, 0, 2);
        strip_lane(x + s * STRIP_WIDTH * p->k + (lane * all_steps + i / LANES) * STRIP_WIDTH,
                   panel + lane * steps * PANEL, steps, sums[s][lane][0], i == 0);
      }
  }
  for (int64_t r = 0; r < MIN(strips * STRIP, p->rows - strip * STRIP); r++) {
    float out[PANEL];
    const vec *of_row = sums[r / STRIP][0][r % STRIP];
    store(out, tree(of_row, 2 * STRIP));
    store(out + LANES, tree(of_row + 1, 2 * STRIP));
    put(p, strip * STRIP + r, col, count, out);
  }
}

/* ---- the product */

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
