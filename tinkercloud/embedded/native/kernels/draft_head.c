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
    embed_row(model, p->batch->tokens[m], inputs);
    rms_norm(inputs, draft->embed_norm, d, model->eps, inputs);
    round_inputs(reader, &p->narrow_rows[JOINED], m, 0, d, inputs);
    rms_norm(p->x + m * d, draft->feature_norm, d, model->eps, inputs);
    round_inputs(reader, &p->narrow_rows[JOINED], m, d, d, inputs);
  }
  end_stage(w);
}

/* ---- guesses: the draw of draw.c by scores in float32. What a draft head draws changes no result,
   so that two scores which differ by a rounding may change places; it has few tokens, and the noise
   of each is computed. */

void choose_guessed(walk_t *w, int64_t index) {
  (void)index;
  choose_rows(w, w->p->batch->guesses->rows, w->p->batch->guesses->num_rows);
}

/* Random numbers of some tokens, by their numbers among the target's, ascending: of as many as one
   call gives. Returns the place behind the last of them. */
static int64_t find_words(const noise_key_t *key, const int64_t *ids, int64_t first, int64_t size,
                          uint32_t *out) {
  uint64_t blocks[COUNTERS] = {0};
  uint32_t words[GROUP];
  int64_t last = -1, end = first, counter = 0;
  for (; end < size; end++) {
    uint64_t block = (uint64_t)ids[end] / BLOCK_WORDS;
    if (last >= 0 && blocks[last] == block) continue;
    if (last == COUNTERS - 1) break;
    blocks[++last] = block;
  }
  philox(blocks, key, words);
  for (int64_t i = first; i < end; i++) {
    counter += blocks[counter] != (uint64_t)ids[i] / BLOCK_WORDS;
    out[i] = words[word_at(counter, ids[i])];
  }
  return end;
}

/* Of a uniform u: -log(-log1p(-u)), which is -log u where u is small. */
INLINE vec noise_of(vec u) {
  vec series = u * fused(u, all(0.5f), all(1.0f)), exact = all(0.0f) - log_vec(all(1.0f) - u);
  ivec is_small = u < all(1e-3f);
  return all(0.0f) - log_vec((vec)(((ivec)series & is_small) | ((ivec)exact & ~is_small)));
}

static void add_noise(const draw_t *draw, const int64_t *ids, int64_t size, float *scores) {
  noise_key_t key = key_of(draw);
  uint32_t words[PARTITION];
  for (int64_t first = 0; first < size;) first = find_words(&key, ids, first, size, words);
  for (int64_t i = size; i % LANES; i++) words[i] = 0; /* whole vectors are read */
  for (int64_t i = 0; i < size; i += LANES) {
    int64_t count = MIN(LANES, size - i);
    uvec number;
    memcpy(&number, words + i, sizeof number);
    vec noise = noise_of((__builtin_convertvector(number, vec) + all(0.5f)) * all(0x1p-32f));
    if (count == LANES)
      store(scores + i, load(scores + i) + noise);
    else
      for (int64_t j = 0; j < count; j++) scores[i + j] += noise[j];
  }
}

/* Lower ids come first. */
static guess_t better(guess_t a, guess_t b) {
  if (b.best > a.best) return (guess_t){b.id, b.best, MAX(a.best, b.second)};
  return (guess_t){a.id, a.best, MAX(a.second, b.best)};
}

static guess_t guess_of(const float *scores, range_t tokens) {
  int64_t size = tokens.end - tokens.first, at = 0;
  guess_t guess = {-1, -INFINITY, -INFINITY};
  float best = largest(scores, size);
  while (at < size && scores[at] != best) at++;
  if (at == size) return guess; /* they are no numbers */
  float second = MAX(largest(scores, at), largest(scores + at + 1, size - at - 1));
  return (guess_t){tokens.first + at, best, second};
}

static void guess_part(const walk_t *w, int64_t row, int64_t part, float *logits) {
  const pass_t *p = w->p;
  const draw_t *draw = &p->batch->guesses->draws[row];
  range_t tokens = partition_at(p->model->vocab, part);
  int64_t size = tokens.end - tokens.first;
  float t = draw->temperature;
  if (t > 0.0f && t != 1.0f)
    for (int64_t i = 0; i < size; i++) logits[i] = logits[i] / t;
  if (t > 0.0f) add_noise(draw, p->model->draft->ids + tokens.first, size, logits);
  p->guesses[row * partitions_of(p->model->vocab) + part] = guess_of(logits, tokens);
}

void guess_tokens(walk_t *w, int64_t index) {
  (void)index;
  const guesses_t *guesses = w->p->batch->guesses;
  int64_t count = partitions_of(w->p->model->vocab);
  visit_partitions(w, guesses->rows, guesses->num_rows, guess_part);
  EACH_ROW(w, m, guesses->num_rows) {
    guess_t guess = w->p->guesses[m * count];
    for (int64_t part = 1; part < count; part++)
      guess = better(guess, w->p->guesses[m * count + part]);
    guesses->ids[m] = guess.id;
    guesses->leads[m] = guess.best - guess.second;
  }
  end_stage(w);
}

/* ---- chains */

/* What a step reads and writes, of the chains that are not at their ends. */
typedef struct {
  float *x, *hidden, *leads;
  int64_t *tokens, *rows, *chain, *ids;
  draw_t *draws;
  int32_t *positions, *sequence;
} step_rows_t;

static int64_t lay_out_step(step_rows_t *r, int64_t rows, int64_t d, char *memory) {
  struct {
    void *place; /* where the array's address goes */
    size_t bytes;
  } arrays[] = {
      {&r->x, (size_t)d * sizeof *r->x}, {&r->hidden, (size_t)d * sizeof *r->hidden},
      {&r->leads, sizeof *r->leads},     {&r->tokens, sizeof *r->tokens},
      {&r->rows, sizeof *r->rows},       {&r->chain, sizeof *r->chain},
      {&r->ids, sizeof *r->ids},         {&r->draws, sizeof *r->draws},
      {&r->positions, sizeof *r->positions}, {&r->sequence, sizeof *r->sequence}};
  int64_t bytes = 0;
  for (int i = 0; i < COUNT(arrays); i++) {
    char *at = memory ? memory + bytes : NULL;
    memcpy(arrays[i].place, &at, sizeof at);
    bytes += rounded_up(rows * (int64_t)arrays[i].bytes, LINE_BYTES);
  }
  return bytes;
}

/* Notes what each row has drawn, and moves those that draw again to the front; how many do. */
static int64_t end_step(const model_t *model, const chains_t *c, step_rows_t *r, int64_t rows,
                        int64_t step) {
  int64_t d = model->hidden, kept = 0;
  for (int64_t i = 0; i < rows; i++) {
    int64_t chain = r->chain[i];
    if (r->ids[i] < 0) continue;
    int64_t token = model->draft->ids[r->ids[i]];
    c->tokens[chain * c->steps + step] = token;
    c->leads[chain * c->steps + step] = r->leads[i];
    if (step + 1 >= c->most[chain] || r->leads[i] < c->least_lead) continue;
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
  guesses_t guesses = {rows, r->rows, r->draws, r->ids, r->leads};
  /* What the layer has put out for the last rows is there: the first tokens need no layer. */
  batch_t batch = {.rows = rows, .first_layer = step ? 0 : 1, .end_layer = 1, .x = r->x,
                   .tokens = r->tokens, .positions = r->positions, .sequence = r->sequence,
                   .tables = c->tables, .table_stride = c->table_stride, .cosine = c->cosine,
                   .sine = c->sine, .hidden = r->hidden, .guesses = &guesses};
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
    c->leads[i] = 0.0f;
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
