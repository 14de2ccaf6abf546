/* From logits to the tokens that may win, for decoding/sampler.py: the Gumbel-max trick over the
   whole vocabulary, but with logarithms for a few tokens only. A row is one thread's, so that no
   result depends on their number. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "log_sum_exp.h"
#include "scan.h"
#include "team.h"
#include "vectors.h"

/* A token's score is its weight (logit / temperature) plus noise, -log(-log1p(-u)) with u uniform
   (decoding/sampler.py). Noise above LUCK is rare, and a token without it needs a weight close to
   the best score known: only those few are scored, exactly, by the caller. */

#define LUCK 8.0
#define LUCKY_WORD 1440786u /* u below it: noise above LUCK */
#define SLACK 1e-3          /* for the rounding of what is compared here */

/* Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), as numpy has
   it: constants and rounds are part of what a seed means. */
static void philox(uint64_t counter[4], uint64_t key0, uint64_t key1, uint64_t out[4]) {
  uint64_t a = counter[0], b = counter[1], c = counter[2], d = counter[3];
  for (int i = 0; i < 10; i++) {
    unsigned __int128 first = (unsigned __int128)a * 0xD2E7470EE14C6C93ull;
    unsigned __int128 second = (unsigned __int128)c * 0xCA5A826395121157ull;
    uint64_t next_a = (uint64_t)(second >> 64) ^ b ^ key0, next_c = (uint64_t)(first >> 64) ^ d ^ key1;
    b = (uint64_t)second;
    d = (uint64_t)first;
    a = next_a;
    c = next_c;
    key0 += 0x9E3779B97F4A7C15ull;
    key1 += 0xBB67AE8584CAA73Bull;
  }
  out[0] = a;
  out[1] = b;
  out[2] = c;
  out[3] = d;
}

static double score_of(float weight, uint32_t word) {
  return weight - log(-log1p(-(word + 0.5) * 0x1p-32));
}

static void find_best(const float *logits, int64_t size, int64_t *best) {
  float top = largest(logits, size);
  int64_t i = 0;
  for (; i < size - 1 && logits[i] != top; i++) continue;
  *best = i;
}

/* Notes a token that may win; 0 when there are too many. */
static int offer(scan_t *s, int64_t row, int64_t id, uint32_t word) {
  int64_t count = s->count[row];
  if (count == s->limit) {
    s->count[row] = -1;
    return 0;
  }
  s->ids[row * s->limit + count] = id;
  s->words[row * s->limit + count] = word;
  s->count[row] = count + 1;
  return 1;
}

/* ---- top-k and top-p: the tokens that are kept are those up to one of them, best first */

typedef struct {
  float weight;
  int32_t id;
  double mass; /* exp(weight - the best weight) */
} item_t;

static int ranks_before(item_t a, item_t b) {
  return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
}

static void swap(item_t *items, int64_t a, int64_t b) {
  item_t kept = items[a];
  items[a] = items[b];
  items[b] = kept;
}

static item_t middle_of(item_t a, item_t b, item_t c) {
  if (ranks_before(b, a)) {
    item_t kept = a;
    a = b;
    b = kept;
  }
  return ranks_before(b, c) ? b : ranks_before(a, c) ? c : a;
}

/* Brings to the front, in any order, the items that fewer than `most` others and less than `mass`
   of their mass rank before; returns how many they are, at least 1. A quickselect, linear in n. */
static int64_t keep_best(item_t *items, int64_t n, int64_t most, double mass) {
  int64_t first = 0, end = n; /* all before `first` are kept, none from `end` on */
  double before = 0.0;        /* the mass of those before `first` */
  while (first < end) {
    item_t pivot = middle_of(items[first], items[(first + end) / 2], items[end - 1]);
    int64_t at = first;
    double above = before;
    for (int64_t i = first; i < end; i++)
      if (ranks_before(items[i], pivot)) {
        above += items[i].mass;
        swap(items, i, at++);
      }
    if (at > 0 && (at >= most || above >= mass)) {
      end = at;
      continue;
    }
    for (int64_t i = at; i < end; i++)
      if (items[i].id == pivot.id) {
        swap(items, i, at);
        break;
      }
    first = at + 1;
    before = above + pivot.mass;
    if (first >= most || before >= mass) return first;
  }
  return first;
}

static int64_t keep(const scan_t *s, int64_t row, const float *weights, item_t *items) {
  const draw_t *draw = &s->draws[row];
  float top = weights[s->best[row]];
  for (int64_t i = 0; i < s->size; i++)
    items[i] = (item_t){weights[i], (int32_t)i, exp((double)weights[i] - top)};
  int64_t count = s->size;
  if (draw->top_k > 0) count = keep_best(items, count, draw->top_k, INFINITY);
  if (draw->top_p < 1.0) {
    double total = 0.0;
    for (int64_t i = 0; i < count; i++) total += items[i].mass;
    count = keep_best(items, count, count, draw->top_p * total);
  }
  return count;
}

static uint32_t word_of(const draw_t *draw, int64_t id) {
  uint64_t counter[4] = {(uint64_t)id / 8 + 1, draw->position, 0, 0}, random[4];
  philox(counter, draw->seed, draw->sample, random);
  uint32_t words[8];
  memcpy(words, random, sizeof words);
  return words[id % 8];
}

static void scan_kept(scan_t *s, int64_t row, const float *weights, item_t *items,
                      uint32_t *words) {
  int64_t count = keep(s, row, weights, items);
  double mass = 0.0, least = -INFINITY;
  for (int64_t i = 0; i < count; i++) {
    mass += items[i].mass;
    words[i] = word_of(&s->draws[row], items[i].id);
    least = MAX(least, score_of(items[i].weight, words[i]));
  }
  s->norm[row] = weights[s->best[row]] + log(mass);
  for (int64_t i = 0; i < count; i++)
    if (score_of(items[i].weight, words[i]) >= least - SLACK)
      if (!offer(s, row, items[i].id, words[i])) return;
}

/* ---- a row */

/* Whether one of the next LANES tokens is lucky or `close`; few are. 1 where they are not so many. */
INLINE int any_may_win(const float *weights, const uint32_t *words, int64_t first, int64_t size,
                       float close) {
#if defined(__AVX512F__)
  if (first + LANES > size) return 1;
  __mmask16 lucky = _mm512_cmplt_epu32_mask(_mm512_loadu_si512(words + first),
                                            _mm512_set1_epi32((int)LUCKY_WORD));
  return (lucky | _mm512_cmp_ps_mask(_mm512_loadu_ps(weights + first), _mm512_set1_ps(close),
                                     _CMP_GE_OQ)) != 0;
#elif defined(__AVX2__)
  if (first + LANES > size) return 1;
  const __m256i turn = _mm256_set1_epi32((int)0x80000000);
  __m256i word = _mm256_xor_si256(_mm256_loadu_si256((const void *)(words + first)), turn);
  __m256i lucky = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(LUCKY_WORD ^ 0x80000000)), word);
  __m256 near = _mm256_cmp_ps(_mm256_loadu_ps(weights + first), _mm256_set1_ps(close), _CMP_GE_OQ);
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_castsi256_ps(lucky), near)) != 0;
#else
  (void)weights, (void)words, (void)first, (void)size, (void)close;
  return 1;
#endif
}

static void scan_row(scan_t *s, int64_t row, float *weights, uint32_t *words, item_t *items) {
  const float *logits = s->logits + row * s->size;
  const draw_t *draw = &s->draws[row];
  find_best(logits, s->size, &s->best[row]);
  s->count[row] = 0;
  float t = draw->temperature > 0.0f ? draw->temperature : 1.0f;
  for (int64_t i = 0; i < s->size; i++) weights[i] = logits[i] / t;
  if (draw->temperature > 0.0f && (draw->top_k > 0 || draw->top_p < 1.0)) {
    scan_kept(s, row, weights, items, words);
    return;
  }
  s->norm[row] = norm_of(weights, s->size, (partition_t *)items);
  if (draw->temperature <= 0.0f) return;
  uint64_t counter[4] = {0, draw->position, 0, 0};
  for (int64_t i = 0; i < s->size; i += 8) {
    uint64_t random[4];
    counter[0]++; /* numpy's generator counts before it draws */
    philox(counter, draw->seed, draw->sample, random);
    memcpy(words + i, random, sizeof random);
  }
  double least = score_of(weights[s->best[row]], words[s->best[row]]);
  for (int64_t first = 0; first < s->size; first += LANES) {
    if (!any_may_win(weights, words, first, s->size, INFINITY)) continue;
    for (int64_t i = first; i < MIN(first + LANES, s->size); i++)
      if (words[i] < LUCKY_WORD) least = MAX(least, score_of(weights[i], words[i]));
  }
  least -= SLACK;
  float close = (float)(least - LUCK);
  for (int64_t first = 0; first < s->size; first += LANES) {
    if (!any_may_win(weights, words, first, s->size, close)) continue;
    for (int64_t i = first; i < MIN(first + LANES, s->size); i++) {
      if (!(words[i] < LUCKY_WORD) && !(weights[i] >= close)) continue;
      if (score_of(weights[i], words[i]) < least) continue;
      if (!offer(s, row, i, words[i])) return;
    }
  }
}

static void run_scan(team_t *team, int rank, void *argument) {
  (void)team, (void)rank;
  scan_t *s = argument;
  int64_t padded = (s->size + 7) / 8 * 8;
  size_t each = sizeof(item_t) + sizeof(float) + sizeof(uint32_t);
  item_t *items = malloc((size_t)padded * each); /* what is not used is not touched */
  if (items == NULL) return;
  float *weights = (float *)(items + padded);
  for (;;) {
    int64_t row = atomic_fetch_add(&s->next, 1);
    if (row >= s->rows) break;
    scan_row(s, row, weights, (uint32_t *)(weights + padded), items);
  }
  free(items);
}

/* 0, or -1 when there is no memory. The structure's arrays are the caller's. */
int scan(team_t *team, scan_t *s) {
  atomic_store(&s->next, 0);
  work(team, run_scan, s);
  return atomic_load(&s->next) >= s->rows ? 0 : -1;
}
