/* A product by strips: for many rows in float32, the sums of tiles.h in another order of work.

   Here a vector holds columns instead of inputs, and each lane of inputs has its turn: weights and
   rows are laid out by lanes first, so that a core reads little at a time, again and again. Lane l
   of a tile's vector is here a sum by itself, of the inputs l, l + LANES, ..., one after the other as
   there, and `tree` adds the lanes up as sum4 does: the same bits. */

#ifndef TINKERCLOUD_STRIPS_H
#define TINKERCLOUD_STRIPS_H

#include "operands.h"
#include "vectors.h"

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

#endif
