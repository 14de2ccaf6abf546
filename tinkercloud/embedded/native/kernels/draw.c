/* The end of a pass over rows from which one token each is drawn: scan.c while the logits are made,
   and without keeping them where nobody asks. Each partition of the vocabulary offers what of it may
   win, and the best of all offers stay. */

#include "log_sum_exp.h"
#include "noise.h"
#include "pass.h"

void choose_drawn(walk_t *w, int64_t index) {
  (void)index;
  const drawing_t *drawing = w->p->batch->drawing;
  EACH_ROW(w, i, drawing->num_rows) w->p->bounds[i] = -INFINITY;
  end_stage(w);
  choose_rows(w, drawing->rows, drawing->num_rows);
}

/* ---- a partition */

/* The larger one of the row's bound and `score`, which the bound is from now on. Which threads have
   been here decides how much is looked at, and not what stays in the end. */
static double raise_bound(_Atomic double *bound, double score) {
  double there = atomic_load_explicit(bound, memory_order_relaxed);
  while (there < score &&
         !atomic_compare_exchange_weak_explicit(bound, &there, score, memory_order_relaxed,
                                                memory_order_relaxed))
    ;
  return MAX(there, score);
}

static void drop_losers(offers_t *offers, double least) {
  int32_t kept = 0;
  for (int32_t i = 0; i < offers->count; i++) {
    if (score_of(offers->weights[i], offers->words[i]) < least) continue;
    offers->ids[kept] = offers->ids[i];
    offers->words[kept] = offers->words[i];
    offers->weights[kept++] = offers->weights[i];
  }
  offers->count = kept;
}

/* A token that scores `*least` at least, which its own score may raise. 0 when there are too many. */
static int offer(offers_t *offers, int64_t id, float weight, uint32_t word, double *least) {
  double raised = score_of(weight, word) - SLACK;
  *least = MAX(*least, raised);
  if (offers->count == MOST_OFFERS) drop_losers(offers, *least);
  if (offers->count == MOST_OFFERS) {
    offers->count = -1;
    return 0;
  }
  offers->ids[offers->count] = (int32_t)id;
  offers->words[offers->count] = word;
  offers->weights[offers->count++] = weight;
  return 1;
}

/* Of a partition's tokens, by their place in it: those with noise above LUCK. */
typedef struct {
  int32_t places[64];
  int count; /* more than fit: nobody knows which */
} lucky_t;

static void find_noise(const noise_key_t *key, range_t tokens, uint32_t *words, lucky_t *lucky) {
  int64_t size = tokens.end - tokens.first;
  for (int64_t group = 0; group < size; group += GROUP) {
    philox_group(tokens.first + group, key, words + group);
    if (!any_lucky(words + group)) continue;
    for (int64_t i = group; i < MIN(group + GROUP, size); i++)
      if (word_in(words, i) < LUCKY_WORD && lucky->count++ < COUNT(lucky->places))
        lucky->places[lucky->count - 1] = (int32_t)i;
  }
}

#define COMPARED 64 /* at once */

/* size: where it is none of them. */
static int64_t place_of(const float *weights, int64_t size, float weight) {
  int64_t i = 0;
  for (int is_here = 0; i + COMPARED <= size; i += COMPARED) {
    for (int64_t j = i; j < i + COMPARED; j++) is_here |= weights[j] == weight;
    if (is_here) break;
  }
  while (i < size && weights[i] != weight) i++;
  return i;
}

static void offer_best(offers_t *offers, const draw_t *draw, _Atomic double *bound,
                       const float *weights, range_t tokens, float top) {
  int64_t size = tokens.end - tokens.first, best = place_of(weights, size, top);
  noise_key_t key = key_of(draw);
  uint32_t words[PARTITION];
  lucky_t lucky = {.count = 0};
  if (best == size) return; /* they are no numbers */
  find_noise(&key, tokens, words, &lucky);
  int is_known = lucky.count <= COUNT(lucky.places);
  double least = score_of(top, word_in(words, best));
  for (int i = 0; is_known && i < lucky.count; i++)
    least = MAX(least, score_of(weights[lucky.places[i]], word_in(words, lucky.places[i])));
  least = raise_bound(bound, least) - SLACK;
  float close = is_known ? (float)(least - LUCK) : -INFINITY;
  for (int i = 0; is_known && i < lucky.count; i++) {
    int64_t at = lucky.places[i];
    uint32_t word = word_in(words, at);
    if (weights[at] >= close || !may_win(weights[at], word, least)) continue;
    if (!offer(offers, tokens.first + at, weights[at], word, &least)) return;
  }
  if (!(top >= close)) return;
  for (int64_t first = 0; first < size; first += LINE) {
    int64_t end = MIN(first + LINE, size);
    if (!any_reaches(weights + first, end - first, close)) continue;
    for (int64_t i = first; i < end; i++) {
      uint32_t word = word_in(words, i);
      if (!(weights[i] >= close) || !may_win(weights[i], word, least)) continue;
      if (!offer(offers, tokens.first + i, weights[i], word, &least)) return;
    }
  }
}

static void draw_part(const walk_t *w, int64_t row, int64_t part, float *logits) {
  const pass_t *p = w->p;
  const drawing_t *drawing = p->batch->drawing;
  const draw_t *draw = &drawing->draws[row];
  range_t tokens = partition_at(p->model->vocab, part);
  int64_t place = row * partitions_of(p->model->vocab) + part, size = tokens.end - tokens.first;
  int64_t kept = drawing->kept[row];
  offers_t *offers = &p->offers[place];
  if (kept >= 0)
    memcpy(drawing->logits + kept * p->model->vocab + tokens.first, logits,
           (size_t)size * sizeof *logits);
  int64_t drafted = drawing->drafted[row];
  if (drafted >= tokens.first && drafted < tokens.end)
    drawing->drafted_logits[row] = logits[drafted - tokens.first];
  float t = draw->temperature;
  if (t > 0.0f && t != 1.0f)
    for (int64_t i = 0; i < size; i++) logits[i] = logits[i] / t;
  partition_t sums = p->partitions[place] = sum_partition(logits, size);
  offers->count = 0;
  if (t > 0.0f) {
    offer_best(offers, draw, &p->bounds[row], logits, tokens, sums.top);
    return;
  }
  int64_t best = place_of(logits, size, sums.top);
  if (best == size) return;
  *offers = (offers_t){.count = 1};
  offers->ids[0] = (int32_t)(tokens.first + best);
  offers->weights[0] = sums.top;
}

/* ---- a row */

static double rank_of(const draw_t *draw, const offers_t *offers, int i) {
  float weight = offers->weights[i];
  return draw->temperature > 0.0f ? score_of(weight, offers->words[i]) : weight;
}

/* What is left of all partitions' offers. */
static void keep_best(const drawing_t *drawing, int64_t row, const offers_t *offers,
                      int64_t num_parts) {
  const draw_t *draw = &drawing->draws[row];
  double best = -INFINITY, slack = draw->temperature > 0.0f ? SLACK : 0.0;
  int64_t count = 0, most = draw->temperature > 0.0f ? drawing->limit : 1;
  for (int64_t part = 0; part < num_parts; part++) {
    for (int i = 0; i < offers[part].count; i++) best = MAX(best, rank_of(draw, &offers[part], i));
    if (offers[part].count < 0) count = -1;
  }
  for (int64_t part = 0; part < num_parts && count >= 0; part++)
    for (int i = 0; i < offers[part].count && count >= 0; i++) {
      if (!(rank_of(draw, &offers[part], i) >= best - slack)) continue;
      if (count == most) {
        if (draw->temperature > 0.0f) count = -1; /* else the first of equals has won */
        continue;
      }
      int64_t at = row * drawing->limit + count++;
      drawing->ids[at] = offers[part].ids[i];
      drawing->words[at] = offers[part].words[i];
      drawing->weights[at] = offers[part].weights[i];
    }
  drawing->count[row] = count;
}

void draw_tokens(walk_t *w, int64_t index) {
  (void)index;
  const pass_t *p = w->p;
  const drawing_t *drawing = p->batch->drawing;
  int64_t count = partitions_of(p->model->vocab);
  visit_partitions(w, drawing->rows, drawing->num_rows, draw_part);
  EACH_ROW(w, m, drawing->num_rows) {
    drawing->norms[m] = combine_partitions(p->partitions + m * count, count);
    keep_best(drawing, m, p->offers + m * count, count);
  }
  end_stage(w);
}
