/* What the two forms of attention share: by vectors (attention.c), and in bfloat16 by the tiles of AMX
   (attention_by_tiles.c). */

#ifndef TINKERCLOUD_ATTENTION_H
#define TINKERCLOUD_ATTENTION_H

#include "activations.h"
#include "attention_tiles.h"
#include "pass.h"

#define ALIGNED __attribute__((aligned(LINE_BYTES)))
#define MOST_SOFTENED 8 /* queries at once */
#define SHARED __attribute__((noinline, unused)) /* and compiled to one order of sums */

/* ---- from scores to probabilities */

#define EACH_OF_UNIT(v) _Pragma("GCC unroll 16") for (int v = 0; v < UNIT_VECS; v++)

/* What one query has gathered so far: the largest score, and the sum relative to it. */
typedef struct {
  float best, mass;
} mixture_t;

/* What is done to all scores. cap: 0 for none. */
typedef struct {
  float scale, cap;
  int kind;
  int64_t error_steps; /* of keys' rounding errors */
} scoring_t;

INLINE float lane_max(vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  EACH(j, LANES) most = MAX(most, v[j]);
  return most;
#endif
}

/* 2 LANES probabilities, rounded, as narrow words. */
INLINE vec to_words(vec first, vec second) {
#if HAS_PAIRS
  return (vec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
  vec words;
  vec halves[2] = {first, second};
  EACH(i, 2) {
    ivec bits = (ivec)halves[i]; /* not negative, and no infinity */
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    half_vec rounded = __builtin_convertvector(bits, half_vec);
    memcpy((char *)&words + i * (int)sizeof rounded, &rounded, sizeof rounded);
  }
  return words;
#endif
}

/* At `at`, as values are multiplied with them. */
INLINE void store_words(int kind, vec words, float *at) {
  if (kind == PAIRED) {
    store(at, words);
    return;
  }
  narrow numbers[2 * LANES];
  memcpy(numbers, &words, sizeof words);
  store(at, widen(numbers));
  store(at + LANES, widen(numbers + LANES));
}

static SHARED void cap_unit(float *scores, const scoring_t *scoring) {
  for (int v = 0; v < UNIT_VECS; v++) {
    float *at = scores + v * LANES;
    store(at, capped(load(at) * all(scoring->scale), scoring->cap));
  }
}

/* Those from `first` to before `end` are seen; the others may be no numbers. */
static SHARED void mask_scores(float *scores, int64_t first, int64_t end) {
  for (int64_t i = 0; i < first; i++) scores[i] = -INFINITY;
  for (int64_t i = end; i < UNIT; i++) scores[i] = -INFINITY;
}

/* Scores of a unit, [count][UNIT], become the words of probabilities relative to each query's largest
   score so far; keep: the factor of what the query has gathered before. Query by query in each of
   the loops, since each of them waits for its own sums. One function for queries of every tile, so
   that it is compiled to one order of sums. */
static SHARED void soften(int64_t count, float *scores, const scoring_t *scoring, mixture_t *mixes,
                          float *keep) {
  vec scale = all(scoring->cap == 0.0f ? scoring->scale : 1.0f);
  float best[MOST_SOFTENED];
  for (int64_t g = 0; g < count; g++) {
    float *at = scores + g * UNIT;
    vec most = all(-INFINITY);
    EACH_OF_UNIT(v) {
      vec score = load(at + v * LANES) * scale;
      store(at + v * LANES, score);
      most = vec_max(most, score);
    }
    best[g] = MAX(mixes[g].best, lane_max(most));
    keep[g] = 1.0f;
  }
  for (int64_t g = 0; g < count; g++) {
    float *at = scores + g * UNIT;
    if (best[g] == -INFINITY) { /* nothing seen, here or before */
      memset(at, 0, UNIT * sizeof *at);
      continue;
    }
    vec sum = {};
    EACH_OF_UNIT(v) {
      if (v % 2) continue;
      vec first = exp_vec(load(at + v * LANES) - all(best[g]));
      vec second = exp_vec(load(at + v * LANES + LANES) - all(best[g]));
      if (scoring->kind != WIDE) {
        vec words = to_words(first, second);
        sum += even_half(words) + odd_half(words);
        store_words(scoring->kind, words, at + (scoring->kind == PAIRED ? v / 2 : v) * LANES);
      } else {
        store(at + v * LANES, first);
        store(at + v * LANES + LANES, second);
        sum = sum + first + second;
      }
    }
    if (best[g] != mixes[g].best) keep[g] = exp_vec(all(mixes[g].best - best[g]))[0];
    mixes[g] = (mixture_t){best[g], mixes[g].mass * keep[g] + sum1(sum)};
  }
}

/* ---- a tile: queries of one key/value head and of some rows of one sequence */

#define MAX_QUERIES 24

typedef struct {
  const pass_t *p;
  const layer_t *layer;
  int64_t h, row, first; /* the first query: the `first`th of those of head h from `row` on */
  int64_t count;
  int kind; /* of what is multiplied */
  int64_t next_row, next_h; /* of the tile that this thread probably has next */
} tile_t;

/* Positions that a query sees. */
typedef struct {
  int64_t begin, end;
} span_t;

static inline int64_t query_at(const tile_t *t, int64_t i) {
  int64_t group = t->p->model->heads / t->p->model->kv_heads, at = t->first + i;
  return (t->row + at / group) * t->p->model->heads + t->h * group + at % group;
}

static inline span_t span_of(const tile_t *t, int64_t i) {
  int64_t end = t->p->batch->positions[query_at(t, i) / t->p->model->heads] + 1;
  return (span_t){t->layer->window ? MAX(0, end - t->layer->window) : 0, end};
}

/* 0 is added so that no zero has a sign: where a sum ends would show in it. */
static inline void write_results(const tile_t *t, const mixture_t *mixes, const float *sums,
                          int64_t width) {
  const pass_t *p = t->p;
  int64_t dh = p->model->head_dim;
  float out[width];
  for (int64_t i = 0; i < t->count; i++) {
    for (int64_t d = 0; d < width; d += LANES)
      store(out + d, load(sums + i * width + d) / all(mixes[i].mass) + all(0.0f));
    int64_t heads = p->model->heads, at = query_at(t, i);
    int64_t row = at / heads, in_row = at % heads * dh;
    if (p->model->is_narrow)
      round_inputs(&t->layer->linear[O], &p->narrow_rows[MIXED], row, in_row, dh, out);
    memcpy(p->mixed + at * dh, out, (size_t)dh * sizeof *out);
  }
}

/* ---- attention_by_tiles.c */

INTERNAL void attend_by_tiles(const tile_t *t);

#endif
