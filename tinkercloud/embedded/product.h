/* Matrix products whose every output is computed in the same order, however many rows there are.

   y = x w^T. An output is the sum over chunks of at most CHUNK inputs, one after the other, of the
   chunk's products, added one after the other too: nothing of that depends on the number of rows
   or on which columns a call computes. Columns go together in panels of two vectors, which are
   turned around first ([input][column] instead of [column][input]), in the registers for a few
   rows, into memory near the core for more. */

#ifndef TINKERCLOUD_PRODUCT_H
#define TINKERCLOUD_PRODUCT_H

#include "team.h"
#include "vectors.h"

#define PANEL (2 * LANES) /* columns */
#define CHUNK 256         /* inputs of a panel at most: it stays in the first-level cache */
#define STRIP 6           /* rows that go through a panel together: as registers allow */
#define ROW_BLOCK 240     /* rows for which a panel is made once */
#define LINE 16           /* floats of a cache line */

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

static float dot(const float *x, const float *w, int64_t k) {
  vec acc = {};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) acc += load(x + i) * load(w + i);
  float sum = sum1(acc);
  for (; i < k; i++) sum += x[i] * w[i];
  return sum;
}

/* ---- panels */

/* What is read next, so that it is on its way: rows of a matrix, the first half while a panel is
   made and the other while it is used. */
typedef struct {
  const float *w;
  int64_t stride, count;
} ahead_t;

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

INLINE void fetch(const ahead_t *ahead, int64_t first, int64_t step, int64_t end, int64_t at) {
  for (int64_t r = first; r < MIN(end, ahead->count); r += step)
    __builtin_prefetch(ahead->w + r * ahead->stride + at, 0, 2);
}

/* Columns [0, count) of w (rows of `stride`), inputs [0, k), into panel[k][PANEL]; zeros beyond. */
static void make_panel(const float *w, int64_t stride, int64_t count, int64_t k, float *panel,
                       const ahead_t *ahead) {
  int64_t c = 0;
#if defined(__AVX__)
  for (; c + 8 <= count; c += 8) {
    int64_t i = 0;
    for (; i + 8 <= k; i += 8) {
      __m256 turned[8];
      if (i % LINE == 0) fetch(ahead, c / 2, 1, c / 2 + 4, i);
      turn(w + c * stride + i, stride, turned);
      _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++)
          _mm256_storeu_ps(panel + (i + j) * PANEL + c, turned[j]);
    }
    for (; i < k; i++)
      for (int j = 0; j < 8; j++) panel[i * PANEL + c + j] = w[(c + j) * stride + i];
  }
#endif
  for (; c < PANEL; c++)
    for (int64_t i = 0; i < k; i++) panel[i * PANEL + c] = c < count ? w[c * stride + i] : 0.0f;
}

/* The compiler would load it again for every use. */
#if defined(__AVX__)
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define IN_REGISTER(v) (void)0
#endif

/* sums[row][PANEL] += ROWS rows of x times a panel; every `step`th of the
   other rows of `ahead` from `first` on is fetched meanwhile. */
#define DEFINE_STRIP(ROWS)                                                                         \
  static void strip_##ROWS(const float *x, int64_t xs, const float *panel, int64_t k, float *sums, \
                           const ahead_t *ahead, int64_t first, int64_t step) {                    \
    vec a[ROWS][2] = {};                                                                           \
    for (int64_t start = 0; start < k; start += LINE) {                                            \
      fetch(ahead, PANEL / 2 + first, step, PANEL, start);                                         \
      int64_t end = MIN(start + LINE, k);                                                          \
      for (int64_t i = start; i < end; i++) {                                                      \
        vec left = load(panel + i * PANEL), right = load(panel + i * PANEL + LANES);               \
        IN_REGISTER(left);                                                                         \
        IN_REGISTER(right);                                                                        \
        _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {                                   \
          vec one = all(x[r * xs + i]);                                                            \
          a[r][0] += one * left;                                                                   \
          a[r][1] += one * right;                                                                  \
        }                                                                                          \
      }                                                                                            \
    }                                                                                              \
    _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {                                       \
      store(sums + r * PANEL, load(sums + r * PANEL) + a[r][0]);                                   \
      store(sums + r * PANEL + LANES, load(sums + r * PANEL + LANES) + a[r][1]);                   \
    }                                                                                              \
  }

DEFINE_STRIP(1)
DEFINE_STRIP(2)
DEFINE_STRIP(3)
DEFINE_STRIP(4)
DEFINE_STRIP(5)
DEFINE_STRIP(6)

typedef void strip_t(const float *, int64_t, const float *, int64_t, float *, const ahead_t *,
                     int64_t, int64_t);

/* The strips are as equal as can be: one of two rows would wait for itself. */
static void times_panel(const float *x, int64_t xs, int64_t rows, const float *panel, int64_t k,
                        float *sums, const ahead_t *ahead) {
  static strip_t *const strips[] = {strip_1, strip_2, strip_3, strip_4, strip_5, strip_6};
  int64_t count = (rows + STRIP - 1) / STRIP;
  for (int64_t i = 0; i < count; i++) {
    int64_t first = rows * i / count, end = rows * (i + 1) / count;
    strips[end - first - 1](x + first * xs, xs, panel, k, sums + first * PANEL, ahead, i, count);
  }
}

/* ---- a few rows: the panel stays in registers */

#if defined(__AVX__)
#define FEW 4

#define SOON (4 * LINE) /* inputs ahead of their use that are fetched */

/* sums[row][PANEL] = ROWS rows of x times a panel of w, all k inputs in chunks. */
#define DEFINE_FEW(ROWS)                                                                           \
  static void few_##ROWS(const float *x, int64_t xs, const float *w, int64_t k, int64_t chunk,     \
                         float *sums) {                                                            \
    for (int c = 0; c < PANEL; c += 8, w += 8 * k) {                                               \
      __m256 sum[ROWS] = {}, a[ROWS] = {};                                                         \
      int64_t cut = chunk;                                                                         \
      for (int64_t i = 0; i < k; i += 8) {                                                         \
        if (i == cut) {                                                                            \
          cut += chunk;                                                                            \
          for (int r = 0; r < ROWS; r++) sum[r] += a[r], a[r] = _mm256_setzero_ps();               \
        }                                                                                          \
        if (i % LINE == 0) {                                                                       \
          int64_t soon = i + SOON < k ? i + SOON : 7 * k + i + SOON;                               \
          _Pragma("GCC unroll 8") for (int r = 0; r < 8; r++)                                      \
              __builtin_prefetch(w + r * k + soon, 0, 3);                                          \
        }                                                                                          \
        __m256 turned[8];                                                                          \
        turn(w + i, k, turned);                                                                    \
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++)                                        \
            _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++)                                 \
                a[r] += _mm256_set1_ps(x[r * xs + i + j]) * turned[j];                             \
      }                                                                                            \
      for (int r = 0; r < ROWS; r++) _mm256_storeu_ps(sums + r * PANEL + c, sum[r] + a[r]);        \
    }                                                                                              \
  }

DEFINE_FEW(1)
DEFINE_FEW(2)
DEFINE_FEW(3)
DEFINE_FEW(4)

typedef void few_t(const float *, int64_t, const float *, int64_t, int64_t, float *);

static void few_rows(const float *x, int64_t xs, int64_t rows, const float *w, int64_t k,
                     int64_t chunk, float *sums) {
  static few_t *const few[] = {few_1, few_2, few_3, few_4};
  few[rows - 1](x, xs, w, k, chunk, sums);
}
#else
#define FEW 0
static void few_rows(const float *x, int64_t xs, int64_t rows, const float *w, int64_t k,
                     int64_t chunk, float *sums) {
  (void)x, (void)xs, (void)rows, (void)w, (void)k, (void)chunk, (void)sums;
}
#endif

/* ---- the product */

static void put(const product_t *p, int64_t row, int64_t col, int64_t count, const float *sums) {
  float *y = p->y + row * p->y_stride + col;
  if (p->add)
    for (int64_t c = 0; c < count; c++) y[c] += p->scale * sums[c];
  else if (p->bias)
    for (int64_t c = 0; c < count; c++) y[c] = sums[c] + p->bias[col + c];
  else
    memcpy(y, sums, (size_t)count * sizeof(float));
}

/* Where a row's inputs are cut: as equal as can be, at multiples of eight. */
static int64_t chunk_of(int64_t k) {
  int64_t chunks = (k + CHUNK - 1) / CHUNK;
  return ((k + chunks - 1) / chunks + 7) / 8 * 8;
}

static void one_panel(const product_t *p, int64_t row, int64_t rows, int64_t col, int64_t count) {
  static _Thread_local float panel[CHUNK * PANEL] __attribute__((aligned(64)));
  static _Thread_local float sums[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
  const float *x = p->x + row * p->x_stride, *w = p->w + col * p->k;
  int64_t chunk = chunk_of(p->k);
  if (rows <= FEW && count == PANEL && p->k % 8 == 0) {
    few_rows(x, p->x_stride, rows, w, p->k, chunk, sums);
  } else {
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof(float));
    for (int64_t i = 0; i < p->k; i += chunk) {
      int64_t k = MIN(chunk, p->k - i);
      ahead_t ahead = {i + chunk < p->k ? w + i + chunk : w + PANEL * p->k, p->k, count};
      make_panel(w + i, p->k, count, k, panel, &ahead);
      times_panel(x + i, p->x_stride, rows, panel, k, sums, &ahead);
    }
  }
  for (int64_t r = 0; r < rows; r++) put(p, row + r, col, count, sums + r * PANEL);
}

#define TASK_BYTES (192 * 1024) /* of w */

/* How many columns a thread takes at once: whole panels. */
static int64_t task_columns(int64_t k) {
  return MAX(TASK_BYTES / (k * (int64_t)sizeof(float)) / PANEL, 1) * PANEL;
}

/* The columns `cols` of the product, from a multiple of PANEL on, all rows. */
static void multiply(const product_t *p, range_t cols) {
  for (int64_t row = 0; row < p->rows; row += ROW_BLOCK)
    for (int64_t n = cols.first; n < cols.end; n += PANEL)
      one_panel(p, row, MIN(ROW_BLOCK, p->rows - row), n, MIN(PANEL, cols.end - n));
}

#endif
