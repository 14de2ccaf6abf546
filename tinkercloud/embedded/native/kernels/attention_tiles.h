/* The products of attention by register tiles, for attention.c: queries with the keys of a unit, and
   their probabilities with its values.

   Keys and values lie in words of 32 bits: a float32, or two narrow numbers of neighbouring
   dimensions (keys) or tokens (values). So both number types lie alike, a word being what one step
   of a sum takes: keys [dimension][token], values [token][dimension]. A query's sum is one chain of
   steps, in the order of dimensions or tokens, whatever other queries its tile has.

   Where pairs are multiplied widened (pairs.h), queries and probabilities are floats, two for each
   word; words of keys and values are widened as they are read. */

#ifndef TINKERCLOUD_ATTENTION_TILES_H
#define TINKERCLOUD_ATTENTION_TILES_H

#include "amx/amx.h"
#include "narrow.h"
#include "network.h"
#include "pairs.h"
#include "vectors.h"

#define UNIT_VECS (UNIT / LANES)
#define BLOCK_VECS (KV_BLOCK / LANES)

/* Queries and vectors of a tile: as registers allow. Blocks of keys: as fill the vectors. */
#if LANES == 16
#define TILE_QUERIES 6
#define TILE_BLOCKS 4
#define TILE_VECS 4
#elif LANES == 8
#define TILE_QUERIES 4
#define TILE_BLOCKS 1
#define TILE_VECS 2
#else
#define TILE_QUERIES 2
#define TILE_BLOCKS 1
#define TILE_VECS 4
#endif

typedef float word_t __attribute__((may_alias)); /* read as its bits */

/* The first `count` of LANES words, and zeros. */
INLINE vec load_first(const word_t *p, int64_t count) {
#if defined(__AVX512F__)
  return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
#else
  vec v = {};
  for (int64_t i = 0; i < count; i++) v[i] = p[i];
  return v;
#endif
}

/* What a tile multiplies: floats, pairs of narrow numbers, these widened. */
enum { WIDE, PAIRED, WIDENED, NUM_KINDS };

static inline int kind_of(int64_t is_narrow) {
  if (!is_narrow) return WIDE;
  return widens_pairs() ? WIDENED : PAIRED;
}

#if !HAS_PAIRS
#define ADD_PAIRS(sum, a, b) (void)(a)
#endif

/* sum of each query += its number at `left`, `stride` from the next query's, times `right`. */
#define ADD_EACH(ADD, LEFT, RIGHT)                                                                 \
  EACH(g, count) {                                                                                 \
    vec left_ = all((LEFT)[g * stride]);                                                           \
    EACH(v, vecs) ADD(sum[g][v], left_, RIGHT(right[v]));                                          \
  }

/* One step of all sums. odd: how far behind the even number of a widened pair the odd one is. */
INLINE void add_step(int kind, int count, int vecs, const word_t *left, int64_t stride, int64_t odd,
                     const vec *right, vec (*sum)[TILE_VECS]) {
  if (kind == WIDE) {
    ADD_EACH(ADD_PRODUCT, left, )
  } else if (kind == PAIRED) {
    ADD_EACH(ADD_PAIRS, left, )
  } else if (HAS_PAIRS) { /* in the order of the instruction */
    ADD_EACH(ADD_PRODUCT, left + odd, odd_half)
    ADD_EACH(ADD_PRODUCT, left, even_half)
  } else {
    ADD_EACH(ADD_PRODUCT, left, even_half)
    ADD_EACH(ADD_PRODUCT, left + odd, odd_half)
  }
}

INLINE void load_keys(const word_t *const *keys, int64_t step, vec *key) {
  EACH(v, TILE_VECS)
    key[v] = load(keys[v / BLOCK_VECS] + step * KV_BLOCK + v % BLOCK_VECS * LANES);
}

/* Line `index` of each block, into the cache. Blocks are short and lie anywhere, so that the
   processor foresees little of what is read: keys and values of 128 sequences, which nobody else
   reads, come a quarter faster so. Of a prompt, tile after tile reads the same ones, and to fetch
   them would take a tenth of the time. */
INLINE void fetch_line(const word_t *const *blocks, int64_t count, int64_t index) {
  for (int64_t b = 0; b < count; b++)
    __builtin_prefetch((const char *)blocks[b] + index * LINE_BYTES);
}

/* queries [step][TILE_QUERIES], widened ones [step][2][TILE_QUERIES]; where they are narrow with as
   many steps of their rounding errors behind, and then what meets the keys' errors; keys: of
   TILE_BLOCKS blocks, next: of as many blocks, what is fetched meanwhile; scores [query][UNIT]. */
INLINE void score(int kind, int count, int fetches, const word_t *queries, int64_t steps,
                  int64_t error_steps, const word_t *const *keys, const word_t *const *next,
                  float *scores) {
  const int64_t words = kind == WIDENED ? 2 * TILE_QUERIES : TILE_QUERIES;
  vec sum[TILE_QUERIES][TILE_VECS] = {}, key[TILE_VECS];
  for (int64_t i = 0; i < steps; i++) {
    load_keys(keys, i, key);
    if (fetches) fetch_line(next, TILE_BLOCKS, i);
    add_step(kind, count, TILE_VECS, queries + i * words, 1, TILE_QUERIES, key, sum);
    if (kind == WIDE) continue;
    add_step(kind, count, TILE_VECS, queries + (steps + i) * words, 1, TILE_QUERIES, key, sum);
  }
  for (int64_t i = 0; kind != WIDE && i < error_steps; i++) {
    load_keys(keys, steps + i, key);
    add_step(kind, count, TILE_VECS, queries + (2 * steps + i) * words, 1, TILE_QUERIES, key, sum);
  }
  EACH(g, count) EACH(v, TILE_VECS) store(scores + g * UNIT + v * LANES, sum[g][v]);
}

/* What a unit's values are added with. */
typedef struct {
  const word_t *values[UNIT_BLOCKS]; /* of each block, [step][head size] */
  const word_t *next[UNIT_BLOCKS];   /* what is fetched meanwhile */
  int64_t head_dim, steps;           /* steps: tokens of the unit, or pairs of them */
  const word_t *shares;              /* [query][UNIT], one for each step, or two widened ones */
  const float *keep;                 /* [query], the factor of what was gathered before */
  float *sums;                       /* [query][width] */
  int64_t width;
} values_t;

/* `vecs` vectors of dimensions from `first` on; the last of them has `last` that are there. */
INLINE void add_values(int kind, int count, int fetches, int vecs, int64_t last, const values_t *a,
                       int64_t first) {
  vec sum[TILE_QUERIES][TILE_VECS], value[TILE_VECS];
  EACH(g, count) EACH(v, vecs)
    sum[g][v] = load(a->sums + g * a->width + first + v * LANES) * all(a->keep[g]);
  const int64_t block_steps = kind == WIDE ? KV_BLOCK : KV_BLOCK / 2;
  const word_t *shares = a->shares;
  int64_t line = 0;
  for (int64_t left = a->steps, b = 0; left > 0; left -= block_steps, b++) {
    const word_t *values = a->values[b] + first;
    for (int64_t i = MIN(left, block_steps); i; i--, values += a->head_dim) {
      EACH(v, vecs)
        value[v] = v < vecs - 1 || last == LANES ? load(values + v * LANES)
                                                 : load_first(values + v * LANES, last);
      if (fetches && first == 0) fetch_line(a->next, UNIT_BLOCKS, line++);
      add_step(kind, count, vecs, shares, UNIT, 1, value, sum);
      shares += kind == WIDENED ? 2 : 1;
    }
  }
  EACH(g, count) EACH(v, vecs) store(a->sums + g * a->width + first + v * LANES, sum[g][v]);
}

/* Each by the number of queries, since all of a tile's sums stay in registers, and by whether it
   fetches what is read next. */
typedef struct {
  void (*score)(const word_t *, int64_t, int64_t, const word_t *const *, const word_t *const *,
                float *);
  void (*add_values)(const values_t *);
} attention_tile_t;

#define ALONE __attribute__((noinline)) /* the registers are all needed */

#define DEFINE_TILE_FETCHING(NAME, KIND, QUERIES, FETCHES)                                         \
  static ALONE void score_##NAME##_##QUERIES##_##FETCHES(                                          \
      const word_t *queries, int64_t steps, int64_t error_steps, const word_t *const *keys,        \
      const word_t *const *next, float *scores) {                                                  \
    score(KIND, QUERIES, FETCHES, queries, steps, error_steps, keys, next, scores);                \
  }                                                                                                \
  static ALONE void add_values_##NAME##_##QUERIES##_##FETCHES(const values_t *a) {                 \
    int64_t i = 0, dh = a->head_dim;                                                               \
    for (; i + TILE_VECS * LANES <= dh; i += TILE_VECS * LANES)                                    \
      add_values(KIND, QUERIES, FETCHES, TILE_VECS, LANES, a, i);                                  \
    if (i + TILE_VECS / 2 * LANES <= dh) {                                                         \
      add_values(KIND, QUERIES, FETCHES, TILE_VECS / 2, LANES, a, i);                              \
      i += TILE_VECS / 2 * LANES;                                                                  \
    }                                                                                              \
    for (; i < dh; i += LANES)                                                                     \
      add_values(KIND, QUERIES, FETCHES, 1, MIN(LANES, dh - i), a, i);                             \
  }

#define DEFINE_ATTENTION_TILE(NAME, KIND, QUERIES)                                                 \
  DEFINE_TILE_FETCHING(NAME, KIND, QUERIES, 0) DEFINE_TILE_FETCHING(NAME, KIND, QUERIES, 1)

#define LISTED(NAME, QUERIES)                                                                      \
  {{score_##NAME##_##QUERIES##_0, add_values_##NAME##_##QUERIES##_0},                              \
   {score_##NAME##_##QUERIES##_1, add_values_##NAME##_##QUERIES##_1}},

#if TILE_QUERIES >= 4
#define FOUR_QUERIES(USE, ...) USE(__VA_ARGS__, 3) USE(__VA_ARGS__, 4)
#else
#define FOUR_QUERIES(USE, ...)
#endif
#if TILE_QUERIES == 6
#define SIX_QUERIES(USE, ...) USE(__VA_ARGS__, 5) USE(__VA_ARGS__, 6)
#else
#define SIX_QUERIES(USE, ...)
#endif
#define EACH_QUERIES(USE, ...)                                                                     \
  USE(__VA_ARGS__, 1) USE(__VA_ARGS__, 2) FOUR_QUERIES(USE, __VA_ARGS__)                           \
  SIX_QUERIES(USE, __VA_ARGS__)

EACH_QUERIES(DEFINE_ATTENTION_TILE, wide, WIDE)
#if !HAS_AMX
EACH_QUERIES(DEFINE_ATTENTION_TILE, widened, WIDENED)
#if HAS_PAIRS
EACH_QUERIES(DEFINE_ATTENTION_TILE, paired, PAIRED)
#endif
#endif

static const attention_tile_t attention_tiles[NUM_KINDS][TILE_QUERIES][2] = {
    [WIDE] = {EACH_QUERIES(LISTED, wide)},
#if !HAS_AMX
    [WIDENED] = {EACH_QUERIES(LISTED, widened)},
#if HAS_PAIRS
    [PAIRED] = {EACH_QUERIES(LISTED, paired)},
#endif
#endif
};

#endif
