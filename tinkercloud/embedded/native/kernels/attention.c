/* Attention over keys and values that lie in blocks, for forward.c.

   A query goes through its sequence in units of 64 positions from position 0 on, with the largest
   score and the sums so far (the online softmax of Milakov and Gimelshein, arXiv 1805.02867). What
   it computes depends on its own position alone: not on the queries beside it, nor on whether keys
   and values were written in this pass or an earlier one. A position that it does not see has a
   probability of 0, which changes no sum; so units are cut where the last query of a tile ends. */

#include "amx/amx.h"
#include "attention.h"
#include "pairs.h"
#include "placing.h"

void place_rows(walk_t *w, const layer_t *layer) {
  EACH_ROW(w, m, w->p->batch->rows) {
    if (w->p->model->norm_spans_heads) norm_all_heads(w->p, layer, m);
    for (int64_t h = 0; h < w->p->model->kv_heads; h++) place_head(w->p, layer, m, h);
  }
  end_stage(w);
}

/* ---- a tile */

#define MAX_PARTS ((MAX_QUERIES + TILE_QUERIES - 1) / TILE_QUERIES)

/* Queries that go through a unit together. */
typedef struct {
  int64_t count;
  span_t span;     /* of all of them */
  const span_t *spans;
  mixture_t *mixes;
  word_t *queries; /* [step][TILE_QUERIES] */
  float *sums;     /* [count][width] */
} part_t;

typedef uint32_t bits_t __attribute__((may_alias)); /* of a word */

static int64_t query_words(const model_t *model, int kind) {
  int64_t numbers = model->is_narrow ? 2 * model->head_dim + model->key_errors : model->head_dim;
  return kind == PAIRED ? numbers / 2 : numbers;
}

/* A query rounded, after that its rounding errors, and then what errors of keys are multiplied with:
   the rounded query's numbers of these dimensions. Two numbers are a word, or each widened one. */
static void round_query(const tile_t *t, const float *q, bits_t *words) {
  int64_t dh = t->p->model->head_dim, errors = t->p->model->key_errors, count = 2 * dh + errors;
  const int64_t *dims = t->layer->key_dims + t->h * errors;
  narrow numbers[count];
  float rounded[dh], rest[dh];
  memcpy(rounded, q, sizeof rounded);
  round_to_narrow(rounded, dh, numbers);
  for (int64_t d = 0; d < dh; d++) rest[d] = q[d] - rounded[d];
  round_to_narrow(rest, dh, numbers + dh);
  for (int64_t i = 0; i < errors; i++) numbers[2 * dh + i] = numbers[dims[i]];
  if (t->kind != PAIRED)
    for (int64_t i = 0; i < count; i++) words[i * TILE_QUERIES] = (bits_t)numbers[i] << 16;
  else
    for (int64_t i = 0; i < count; i += 2) memcpy(words + i / 2 * TILE_QUERIES, numbers + i, 4);
}

static span_t read_query(const tile_t *t, int64_t i, bits_t *words) {
  const pass_t *p = t->p;
  int64_t dh = p->model->head_dim, at = query_at(t, i);
  const bits_t *q = (const bits_t *)(p->q + at * dh);
  if (p->model->is_narrow)
    round_query(t, p->q + at * dh, words);
  else
    for (int64_t d = 0; d < dh; d++) words[d * TILE_QUERIES] = q[d];
  return span_of(t, i);
}

/* What a tile's queries are and have gathered so far. */
typedef struct {
  span_t spans[MAX_QUERIES];
  mixture_t mixes[MAX_QUERIES];
  int64_t num_parts;
  part_t parts[MAX_PARTS];
} queries_t;

/* Parts as equal as can be, since one query alone waits for its own sums. */
static void read_queries(const tile_t *t, queries_t *queries, word_t *words, float *sums,
                         int64_t width) {
  int64_t parts = (t->count + TILE_QUERIES - 1) / TILE_QUERIES;
  queries->num_parts = parts;
  for (int64_t i = 0; i < parts; i++) {
    int64_t first = t->count * i / parts, end = t->count * (i + 1) / parts;
    part_t part = {end - first, {INT64_MAX, 0}, queries->spans + first, queries->mixes + first,
                   words + i * TILE_QUERIES * query_words(t->p->model, t->kind), sums + first * width};
    for (int64_t j = first; j < end; j++) {
      span_t span = read_query(t, j, (bits_t *)part.queries + j - first);
      part.span = (span_t){MIN(part.span.begin, span.begin), MAX(part.span.end, span.end)};
      queries->spans[j] = span;
      queries->mixes[j] = (mixture_t){-INFINITY, 0.0f};
    }
    queries->parts[i] = part;
  }
  memset(sums, 0, (size_t)(t->count * width) * sizeof *sums);
}

/* A unit of keys and values; next: the keys that are read after it. Blocks past the last that is
   seen are the last one: read, and not seen. */
typedef struct {
  int64_t start, blocks; /* blocks: that are seen */
  const word_t *keys[UNIT_BLOCKS], *values[UNIT_BLOCKS], *next[UNIT_BLOCKS];
} unit_t;

/* Blocks up to the last that a query sees. fetches: values while keys are scored, then the next keys
   while values are added; where a unit ends early, some of these keys before and some after. */
static void mix_unit(const part_t *part, const unit_t *unit, int fetches, values_t *values,
                     const scoring_t *scoring) {
  const attention_tile_t *tile = &attention_tiles[scoring->kind][part->count - 1][fetches];
  int64_t start = unit->start;
  int64_t seen = MIN(UNIT, part->span.end - start), dh = values->head_dim;
  int64_t blocks = (seen + KV_BLOCK - 1) / KV_BLOCK;
  ALIGNED float scores[TILE_QUERIES * UNIT];
  float keep[TILE_QUERIES];
  const word_t *fetched[UNIT_BLOCKS];
  for (int64_t b = 0; b < UNIT_BLOCKS; b++)
    fetched[b] = b < unit->blocks ? unit->values[b] : unit->next[b];
  for (int64_t b = 0; b < blocks; b += TILE_BLOCKS)
    tile->score(part->queries, scoring->kind == WIDE ? dh : dh / 2, scoring->error_steps,
                unit->keys + b, fetched + b, scores + b * KV_BLOCK);
  for (int64_t g = 0; g < part->count; g++) {
    if (scoring->cap != 0.0f) cap_unit(scores + g * UNIT, scoring);
    int64_t first = part->spans[g].begin - start, end = part->spans[g].end - start;
    if (first > 0 || end < UNIT) mask_scores(scores + g * UNIT, MIN(first, UNIT), MAX(end, 0));
  }
  soften(part->count, scores, scoring, part->mixes, keep);
  values->steps = scoring->kind == WIDE ? seen : (seen + 1) / 2;
  values->shares = scores;
  values->keep = keep;
  values->sums = part->sums;
  memcpy(values->values, unit->values, sizeof values->values);
  memcpy(values->next, unit->next, sizeof values->next);
  tile->add_values(values);
  int64_t lines = (scoring->kind == WIDE ? dh : dh / 2) + scoring->error_steps;
  for (int64_t line = values->steps; fetches && line < lines; line++)
    fetch_line(unit->next, unit->blocks, line);
}

static void find_keys(const tile_t *t, int64_t start, int64_t end, const word_t **keys,
                      const word_t **values) {
  const batch_t *batch = t->p->batch;
  const int32_t *table = batch->tables + batch->sequence[t->row] * batch->table_stride;
  for (int64_t b = 0; b < UNIT_BLOCKS; b++) {
    int64_t block = table[MIN(start / KV_BLOCK + b, (end - 1) / KV_BLOCK)];
    keys[b] = keys_at(t->p->model, t->layer, block, t->h);
    if (values) values[b] = values_at(t->p->model, t->layer, block, t->h);
  }
}

/* Of the tile that this thread probably has next, the first unit's keys; what places its row's is
   fetched at once. */
static void find_next_tile(const tile_t *t, const word_t **keys) {
  tile_t next = *t;
  next.row = t->next_row, next.h = t->next_h, next.first = 0;
  span_t span = span_of(&next, 0);
  find_keys(&next, span.begin / UNIT * UNIT, span.end, keys, NULL);
  if (t->p->tiles_place) fetch_place(t->p, t->layer, next.row, next.h);
}

static unit_t unit_at(const tile_t *t, int64_t start, int64_t end, int fetches) {
  unit_t unit = {start, MIN(UNIT_BLOCKS, (end - start + KV_BLOCK - 1) / KV_BLOCK), {0}, {0}, {0}};
  find_keys(t, start, end, unit.keys, unit.values);
  if (fetches && start + UNIT < end)
    find_keys(t, start + UNIT, end, unit.next, NULL);
  else if (fetches)
    find_next_tile(t, unit.next);
  return unit;
}

static void attend_tile(const tile_t *t) {
  const model_t *model = t->p->model;
  int64_t dh = model->head_dim, width = (dh + LANES - 1) / LANES * LANES;
  ALIGNED word_t words[MAX_PARTS * TILE_QUERIES * query_words(model, t->kind)];
  ALIGNED float sums[MAX_QUERIES * width];
  queries_t queries;
  read_queries(t, &queries, words, sums, width);
  span_t span = queries.parts[0].span;
  for (int64_t i = 1; i < queries.num_parts; i++) {
    span.begin = MIN(span.begin, queries.parts[i].span.begin);
    span.end = MAX(span.end, queries.parts[i].span.end);
  }
  const scoring_t scoring = {model->score_scale, model->score_cap, t->kind, model->key_errors / 2};
  values_t values = {.head_dim = dh, .width = width};
  int fetches = t->count <= MAX_QUERIES / 2; /* more are some of a prompt's */
  for (int64_t start = span.begin / UNIT * UNIT; start < span.end; start += UNIT) {
    unit_t unit = unit_at(t, start, span.end, fetches);
    for (int64_t i = 0; i < queries.num_parts; i++) {
      const part_t *part = &queries.parts[i];
      if (start < part->span.end && start + UNIT > part->span.begin)
        mix_unit(part, &unit, fetches && i == 0, &values, &scoring);
    }
  }
  write_results(t, queries.mixes, sums, width);
}

/* ---- the work */

/* Rows of one sequence from `row` on, as many as a tile takes. */
static int64_t tile_rows(const pass_t *p, int64_t row) {
  const batch_t *batch = p->batch;
  int64_t group = p->model->heads / p->model->kv_heads, most = MAX(1, MAX_QUERIES / group);
  int64_t end = MIN(row + most, batch->rows), rows = 1;
  while (row + rows < end && batch->sequence[row + rows] == batch->sequence[row]) rows++;
  return rows;
}

/* Whether a row of another sequence reads the block that row m is placed in: only full blocks are
   shared. */
static int is_read_by_others(const batch_t *batch, int64_t m) {
  int64_t index = batch->positions[m] / KV_BLOCK, stride = batch->table_stride;
  if (batch->positions[m] % KV_BLOCK != KV_BLOCK - 1) return 0;
  int32_t block = batch->tables[batch->sequence[m] * stride + index];
  for (int64_t i = 0; i < batch->rows; i++) {
    if (batch->sequence[i] == batch->sequence[m] || !ends_sequence(batch, i)) continue;
    if (batch->positions[i] / KV_BLOCK < index) continue;
    if (batch->tables[batch->sequence[i] * stride + index] == block) return 1;
  }
  return 0;
}

/* Whether no row of the batch attends to one of another tile, and each tile's heads can be placed
   without the others. */
int tiles_are_alone(const pass_t *p) {
  const batch_t *batch = p->batch;
  if (p->model->norm_spans_heads) return 0;
  for (int64_t row = 0, rows; row < batch->rows; row += rows) {
    rows = tile_rows(p, row);
    if (!ends_sequence(batch, row + rows - 1)) return 0;
    for (int64_t m = row; m < row + rows; m++)
      if (is_read_by_others(batch, m)) return 0;
  }
  return 1;
}

/* Tasks are the rows of a tile times heads, in this order, so that each thread finds its next rows
   behind those that it had. */
void attend(walk_t *w, const layer_t *layer) {
  const pass_t *p = w->p;
  int64_t heads = p->model->kv_heads, group = p->model->heads / heads;
  int64_t row = 0, index = 0, rows = tile_rows(p, 0);
  int kind = kind_of(p->model->is_narrow);
  for (;;) {
    int64_t task = take(w);
    for (; row < p->batch->rows && index < task / heads; index++) {
      row += rows;
      if (row < p->batch->rows) rows = tile_rows(p, row);
    }
    if (row >= p->batch->rows) break;
    for (int64_t m = row; p->tiles_place && m < row + rows; m++)
      place_head(p, layer, m, task % heads);
    for (int64_t first = 0; first < rows * group; first += MAX_QUERIES) {
      int64_t count = MIN(MAX_QUERIES, rows * group - first);
      int64_t ahead = (task + w->team->size) / heads - task / heads;
      int64_t next_row = MIN(row + ahead * rows, p->batch->rows - 1);
      tile_t tile = {p,    layer,    task % heads, row, first, count,
                     kind, next_row, (task + w->team->size) % heads};
      unsigned control = kind == WIDE ? 0 : begin_pairs();
      if (HAS_AMX && kind != WIDE)
        attend_by_tiles(&tile);
      else
        attend_tile(&tile);
      if (kind != WIDE) end_pairs(control);
    }
  }
  end_stage(w);
}
