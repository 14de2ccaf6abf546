/* A draft head (speculative/head/head.py): what its pass has of its own, and chains of tokens that
   it draws with the target's noise, each from what it has put out for the one before. */

#include <stdlib.h>
#include <string.h>

#include "noise.h"
#include "pass.h"

/* ---- steps of a pass */

/* x / the root of its mean square. */
static void scale_to_unit(const float *x, int64_t size, float eps, float *y) {
  float scale = inverse_norm(x, size, eps);
  for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale;
}

/* Features of the target's states: these grow from layer to layer, so each is scaled by itself. */
void fuse_states(walk_t *w, int64_t index) {
  (void)index;
  const pass_t *p = w->p;
  const draft_head_t *draft = p->model->draft;
  int64_t d = p->model->hidden, count = draft->num_states;
  EACH_ROW(w, m, p->batch->rows)
    for (int64_t s = 0; s < count; s++) {
      float scaled[d];
      scale_to_unit(p->batch->states + (m * count + s) * d, d, p->model->eps, scaled);
      round_inputs(&draft->fuse, &p->narrow_rows[STATES], m, s * d, d, scaled);
    }
  end_stage(w);
  output_t outputs[] = {{&draft->fuse, 0, p->x, d, 0, 1.0f}};
  multiply_modules(w, &(read_t){NULL, &p->narrow_rows[STATES], p->batch->rows, outputs, 1, NULL});
}

/* A row's token and its feature, normed and side by side. */
void join_inputs(walk_t *w) {
  const pass_t *p = w->p;
  const model_t *model = p->model;
  const draft_head_t *draft = model->draft;
  const linear_t *reader = &model->layers[0].linear[Q];
  int64_t d = model->hidden;
  EACH_ROW(w, m, p->batch->rows) {
    float inputs[d];
    int64_t token = p->batch->tokens[m];
    read_weights(weight_at(model->embed, model->embed_is_narrow, model->embed_width, token),
                 model->embed_is_narrow, d, inputs);
    rms_norm(inputs, draft->embed_norm, d, model->eps, inputs);
    round_inputs(reader, &p->narrow_rows[JOINED], m, 0, d, inputs);
    rms_norm(p->x + m * d, draft->feature_norm, d, model->eps, inputs);
    round_inputs(reader, &p->narrow_rows[JOINED], m, d, d, inputs);
  }
  end_stage(w);
}

/* ---- chains */

#define OFFERED 16 /* tokens of a row that may win; two are many */

/* What a step reads and writes, of the chains that are not at their ends. */
typedef struct {
  float *x, *hidden, *weights;
  double *norms;
  int64_t *tokens, *rows, *chain, *count, *ids;
  draw_t *draws;
  int32_t *positions, *sequence;
  uint32_t *words;
} step_rows_t;

static int64_t lay_out_step(step_rows_t *r, int64_t rows, int64_t d, char *memory) {
  struct {
    void *place; /* where the array's address goes */
    size_t bytes;
  } arrays[] = {
      {&r->x, (size_t)d * sizeof *r->x},       {&r->hidden, (size_t)d * sizeof *r->hidden},
      {&r->weights, OFFERED * sizeof *r->weights}, {&r->norms, sizeof *r->norms},
      {&r->tokens, sizeof *r->tokens},         {&r->rows, sizeof *r->rows},
      {&r->chain, sizeof *r->chain},           {&r->count, sizeof *r->count},
      {&r->ids, OFFERED * sizeof *r->ids},     {&r->draws, sizeof *r->draws},
      {&r->positions, sizeof *r->positions},   {&r->sequence, sizeof *r->sequence},
      {&r->words, OFFERED * sizeof *r->words}};
  int64_t bytes = 0;
  for (int i = 0; i < COUNT(arrays); i++) {
    char *at = memory ? memory + bytes : NULL;
    memcpy(arrays[i].place, &at, sizeof at);
    bytes += rounded_up(rows * (int64_t)arrays[i].bytes, LINE_BYTES);
  }
  return bytes;
}

/* The place of the token that a row draws among those offered; -1 for none. Lower ids come first. */
static int64_t winner(const step_rows_t *r, int64_t row) {
  int64_t best = -1, first = row * OFFERED;
  double most = -INFINITY;
  for (int64_t i = 0; i < r->count[row]; i++) {
    double score = r->draws[row].temperature > 0.0f
                       ? score_of(r->weights[first + i], r->words[first + i])
                       : r->weights[first + i];
    if (!(score > most)) continue;
    most = score;
    best = first + i;
  }
  return best;
}

/* Notes what each row has drawn, and moves those that draw again to the front; how many do. */
static int64_t end_step(const model_t *model, const chains_t *c, step_rows_t *r, int64_t rows,
                        int64_t step) {
  int64_t d = model->hidden, kept = 0;
  for (int64_t i = 0; i < rows; i++) {
    int64_t chain = r->chain[i], at = winner(r, i);
    if (at < 0) continue;
    int64_t token = model->draft->ids[r->ids[at]];
    c->tokens[chain * c->steps + step] = token;
    c->chances[chain * c->steps + step] = (float)exp(MIN(0.0, r->weights[at] - r->norms[i]));
    if (step + 1 >= c->most[chain]) continue;
    memmove(r->x + kept * d, r->x + i * d, (size_t)d * sizeof *r->x);
    r->tokens[kept] = token;
    r->positions[kept] = c->lengths[chain] + (int32_t)step;
    r->sequence[kept] = (int32_t)chain;
    r->chain[kept++] = chain;
  }
  return kept;
}

static int draw_step(team_t *team, const model_t *model, const chains_t *c, step_rows_t *r,
                     int64_t rows, int64_t step) {
  for (int64_t i = 0; i < rows; i++) {
    r->draws[i] = c->draws[r->chain[i]];
    r->draws[i].position += (uint64_t)step;
  }
  drawing_t drawing = {rows, OFFERED, r->rows, r->draws, r->norms, r->count, r->ids, r->words,
                       r->weights};
  /* What the layer has put out for the last rows is there: the first tokens need no layer. */
  batch_t batch = {.rows = rows, .first_layer = step ? 0 : 1, .end_layer = 1, .x = r->x,
                   .tokens = r->tokens, .positions = r->positions, .sequence = r->sequence,
                   .tables = c->tables, .table_stride = c->table_stride, .cosine = c->cosine,
                   .sine = c->sine, .hidden = r->hidden, .drawing = &drawing};
  return forward(team, model, &batch);
}

/* 0, or -1 when there is no memory. */
int draft_chains(team_t *team, const model_t *model, const chains_t *c) {
  int64_t d = model->hidden, rows = c->chains;
  step_rows_t r;
  char *memory = aligned_alloc(LINE_BYTES, (size_t)lay_out_step(&r, rows, d, NULL) + LINE_BYTES);
  if (memory == NULL) return -1;
  lay_out_step(&r, rows, d, memory);
  memcpy(r.x, c->outputs, (size_t)(rows * d) * sizeof *r.x);
  for (int64_t i = 0; i < c->chains * c->steps; i++) {
    c->tokens[i] = -1;
    c->chances[i] = 0.0f;
  }
  for (int64_t i = 0; i < rows; i++) {
    r.rows[i] = r.chain[i] = i;
    rms_norm(r.x + i * d, model->final_norm, d, model->eps, r.hidden + i * d);
  }
  int failed = 0;
  for (int64_t step = 0; rows && !failed; step++) {
    failed = draw_step(team, model, c, &r, rows, step);
    if (!failed) rows = end_step(model, c, &r, rows, step);
  }
  free(memory);
  return failed ? -1 : 0;
}
