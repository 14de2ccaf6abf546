/* Attention in bfloat16 by the tiles of AMX: the same units, the same running maximum and the same
   rounding as by vectors (attention.c), in another order of sums.

   Some units go together, because the shapes of tiles differ between scores and values and to set
   them takes as long as a unit. */

#include "attention.h"
#include "placing.h"

#if HAS_AMX

#define PART_QUERIES (MOST_TILE_ROWS / 2)
#define MOST_PARTS ((MAX_QUERIES + PART_QUERIES - 1) / PART_QUERIES)
#define UNITS_OF_PARTS 4 /* that go together where there are several parts: second-level cache */

static_assert(MOST_SOFTENED >= PART_QUERIES, "a part is softened at once");

typedef struct {
  span_t spans[MAX_QUERIES];
  mixture_t mixes[MAX_QUERIES];
  float keep[MOST_PARTS * MOST_UNITS * PART_QUERIES];
  int scales[MOST_PARTS * MOST_UNITS];
} gathered_t;

/* A query rounded, and the rounded numbers that errors of keys are multiplied with; in `errors` the
   errors of rounding it, and zeros. */
static void round_query(const tile_t *t, const float *q, narrow *rounded, narrow *errors) {
  int64_t dh = t->p->model->head_dim, num_errors = t->p->model->key_errors, d = 0;
  const int64_t *dims = t->layer->key_dims + t->h * num_errors;
  for (; d + LANES <= dh; d += LANES) {
    uvec numbers = narrowed_vec(load(q + d));
    store_narrow(rounded + d, numbers);
    store_narrow(errors + d, narrowed_vec(load(q + d) - (vec)(numbers << 16)));
  }
  for (; d < dh; d++) {
    rounded[d] = narrowed(q[d]);
    errors[d] = narrowed(q[d] - widen1(rounded[d]));
  }
  for (int64_t i = 0; i < num_errors; i++) {
    rounded[dh + i] = rounded[dims[i]];
    errors[dh + i] = 0;
  }
}

static span_t read_queries(const tile_t *t, const attention_t *a, narrow *queries, gathered_t *g) {
  int64_t dh = a->head_dim, per_part = a->rows / 2;
  span_t whole = {INT64_MAX, 0};
  memset(queries, 0, (size_t)(a->parts * a->rows * a->query_size) * sizeof *queries);
  for (int64_t i = 0; i < t->count; i++) {
    narrow *row = queries + (i / per_part * a->rows + i % per_part) * a->query_size;
    round_query(t, t->p->q + query_at(t, i) * dh, row, row + per_part * a->query_size);
    g->spans[i] = span_of(t, i);
    g->mixes[i] = (mixture_t){-INFINITY, 0.0f};
    whole = (span_t){MIN(whole.begin, g->spans[i].begin), MAX(whole.end, g->spans[i].end)};
  }
  return whole;
}

/* Scores of a unit of a part to probabilities. */
static void soften_unit(const attention_t *a, const scoring_t *scoring, gathered_t *g, int64_t part,
                        int64_t unit, int64_t start, int64_t count) {
  float *scores = scores_at(a, part, unit);
  int64_t per_part = a->rows / 2, place = part * MOST_UNITS + unit;
  const span_t *spans = g->spans + part * per_part;
  for (int64_t i = 0; i < count; i++) {
    float *at = scores + i * UNIT, *of_errors = at + per_part * UNIT;
    EACH_OF_UNIT(v) store(at + v * LANES, load(at + v * LANES) + load(of_errors + v * LANES));
    if (scoring->cap != 0.0f) cap_unit(at, scoring);
    int64_t first = spans[i].begin - start, end = spans[i].end - start;
    if (first > 0 || end < UNIT) mask_scores(at, MIN(first, UNIT), MIN(MAX(end, 0), UNIT));
  }
  float *keep = g->keep + place * per_part;
  mixture_t *mixes = g->mixes + part * per_part;
  int any = 0; /* has gathered something: else the sums are 0 */
  for (int64_t i = 0; i < count; i++) any |= mixes[i].mass != 0.0f;
  soften(count, scores, scoring, mixes, keep);
  g->scales[place] = 0;
  for (int64_t i = 0; i < count; i++) g->scales[place] |= any && keep[i] != 1.0f;
  for (int64_t i = count; i < per_part; i++) keep[i] = 1.0f;
}

/* Those of the last block that are written, and zeros: a probability of 0 times what is no number
   would be none. */
static const void *written_values(const void *values, int64_t head_dim, int64_t seen,
                                  narrow *copy) {
  int64_t pairs = (seen + 1) / 2, row = 2 * head_dim;
  memcpy(copy, values, (size_t)(pairs * row) * sizeof *copy);
  memset(copy + pairs * row, 0, (size_t)((KV_BLOCK / 2 - pairs) * row) * sizeof *copy);
  return copy;
}

static void fetch_block(const void *block, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += LINE_BYTES) __builtin_prefetch((const char *)block + i);
}

/* The keys of the tile that this thread probably has next, and what places its rows. */
static void fetch_next_tile(const tile_t *t) {
  const pass_t *p = t->p;
  const batch_t *batch = p->batch;
  const int32_t *table = batch->tables + batch->sequence[t->next_row] * batch->table_stride;
  tile_t next = *t;
  next.row = t->next_row, next.h = t->next_h, next.first = 0;
  span_t span = span_of(&next, 0);
  int64_t size = (p->model->head_dim + p->model->key_errors) * KV_BLOCK * 2;
  for (int64_t b = span.begin / KV_BLOCK; b * KV_BLOCK < span.end; b++)
    fetch_block(keys_at(p->model, t->layer, table[b], next.h), size);
  if (p->tiles_place) fetch_place(p, t->layer, next.row, next.h);
}

void attend_by_tiles(const tile_t *t) {
  const model_t *model = t->p->model;
  int64_t dh = model->head_dim, key_size = dh + model->key_errors;
  int64_t parts = (t->count + PART_QUERIES - 1) / PART_QUERIES;
  attention_t a = {.rows = 2 * MIN(t->count, PART_QUERIES), .parts = parts, .head_dim = dh,
                   .width = rounded_up(dh, LINE), .key_size = key_size,
                   .query_size = rounded_up(key_size, NARROW_BLOCK)};
  int64_t most = parts > 1 ? UNITS_OF_PARTS : MOST_UNITS, per_part = a.rows / 2;
  ALIGNED narrow queries[parts * a.rows * a.query_size], last_values[KV_BLOCK * dh];
  ALIGNED float sums[parts * per_part * a.width];
  ALIGNED float scores[((parts - 1) * MOST_UNITS + most) * a.rows * UNIT];
  gathered_t g;
  span_t span = read_queries(t, &a, queries, &g);
  memset(sums, 0, sizeof sums);
  const void *keys[MOST_UNITS * UNIT_BLOCKS], *values[MOST_UNITS * UNIT_BLOCKS];
  a.queries = queries, a.sums = sums, a.scores = scores, a.keys = keys, a.values = values;
  a.keep = g.keep, a.scales = g.scales;
  const int32_t *table = t->p->batch->tables + t->p->batch->sequence[t->row] * t->p->batch->table_stride;
  const scoring_t scoring = {model->score_scale, model->score_cap, PAIRED, 0};
  int fetches = t->count <= MAX_QUERIES / 2; /* more are some of a prompt's */
  for (int64_t start = span.begin / UNIT * UNIT; start < span.end; start += most * UNIT) {
    int64_t end = MIN(start + most * UNIT, span.end);
    a.blocks = (end - start + KV_BLOCK - 1) / KV_BLOCK;
    for (int64_t b = 0; b < a.blocks; b++) {
      int64_t block = table[start / KV_BLOCK + b];
      keys[b] = keys_at(model, t->layer, block, t->h);
      values[b] = values_at(model, t->layer, block, t->h);
    }
    if (end % KV_BLOCK)
      values[a.blocks - 1] = written_values(values[a.blocks - 1], dh, end % KV_BLOCK, last_values);
    if (fetches)
      for (int64_t b = 0; b < a.blocks; b++) fetch_block(values[b], dh * KV_BLOCK * 2);
    score_narrow(&a);
    if (fetches && end == span.end) fetch_next_tile(t);
    for (int64_t part = 0; part < parts; part++)
      for (int64_t unit = 0; unit * UNIT < end - start; unit++)
        soften_unit(&a, &scoring, &g, part, unit, start + unit * UNIT,
                    MIN(per_part, t->count - part * per_part));
    add_narrow_values(&a);
  }
  write_results(t, g.mixes, sums, a.width);
}

#endif
