/* A decoder's forward pass over a ragged batch of rows, on the cores of one machine, in float32 or
   with weights, keys and values in bfloat16. Then what a product with them reads is rounded to
   bfloat16 too, but for queries and for the salient inputs of a module (network.h), which go in as
   pairs of a rounded number and its error; all else stays float32, also between layers.

   Every value is computed by one thread in an order that depends on the row's own sequence alone:
   not on the other rows, on how many there are, or on the number of threads. So the logits of a
   token are the same bits whether it comes in a prompt, alone, or beside a hundred others.

   Compiled on the machine that runs it (compiler.py), for its vector unit. Names: M rows, D hidden
   size, Hq / Hkv query and key/value heads, Dh head size, F inner size, V vocabulary, K the length
   of a dot product. Matrices are packed (packed.h). */

#include <stdlib.h>
#include <string.h>

#include "pass.h"

/* Floats of rows up to which each thread computes every norm for itself: that takes less time than
   waiting for each other. */
#define OWN_NORMS 8192

/* ---- the steps of a pass; `index` is the layer's, where a step is one of a layer's */

static const layer_t *layer_of(const walk_t *w, int64_t index) {
  return &w->p->model->layers[index];
}

static const kept_t *kept_of(const walk_t *w, int64_t index) {
  const batch_t *batch = w->p->batch;
  return batch->kept ? &batch->kept[index - batch->first_layer] : NULL;
}

/* Module `leaf` of a layer into y. */
static output_t output_of(const walk_t *w, int64_t index, int leaf, float *y) {
  const linear_t *linear = &layer_of(w, index)->linear[leaf];
  return (output_t){linear, (int)index * NUM_LINEAR + leaf, y, linear->out, 0, 1.0f};
}

/* Module `leaf` of a layer to the residual; where a norm follows it, into `normed`. */
static output_t added_output(const walk_t *w, int64_t index, int leaf, const float *norm) {
  output_t output = output_of(w, index, leaf, norm ? w->p->normed : w->p->x);
  output.add = !norm;
  output.scale = w->p->model->residual_scale;
  return output;
}

static int num_narrow_rows(const model_t *model) {
  if (!model->is_narrow) return 0;
  return model->draft ? NARROW_ROWS : STATES;
}

/* What products read beyond a row's inputs; but for errors nobody else writes there. */
static void clear_rests(const pass_t *p, int64_t m) {
  for (int i = 0; i < num_narrow_rows(p->model); i++) {
    const narrow_rows_t *rows = &p->narrow_rows[i];
    size_t rest = (size_t)(rows->width - rows->in) * sizeof(narrow);
    for (int64_t copy = 0; copy < (i == NORMED ? p->num_normed : 1); copy++)
      memset(rows->inputs + (copy * p->batch->rows + m) * rows->width + rows->in, 0, rest);
  }
}

void embed_row(const model_t *model, int64_t token, float *x) {
  const char *at = weight_at(model->embed, model->embed_is_narrow, model->embed_width, token);
  read_weights(at, model->embed_is_narrow, model->hidden, x);
  if (model->embedding_scale == 1.0f) return;
  for (int64_t i = 0; i < model->hidden; i++) x[i] *= model->embedding_scale;
}

static void begin(walk_t *w, int64_t index) {
  (void)index;
  const pass_t *p = w->p;
  const model_t *model = p->model;
  int64_t d = model->hidden;
  EACH_ROW(w, m, p->batch->rows) {
    if (p->batch->embeds)
      embed_row(model, p->batch->tokens[m], p->x + m * d);
    if (model->is_narrow) clear_rests(p, m);
  }
  end_stage(w);
}

static void norm_input(walk_t *w, int64_t index) {
  const layer_t *layer = layer_of(w, index);
  if (w->p->model->draft)
    join_inputs(w);
  else
    norm_rows(w, layer->input_norm, &layer->linear[Q], NULL);
}

static void read_queries_and_keys(walk_t *w, int64_t index) {
  const pass_t *p = w->p;
  output_t outputs[] = {output_of(w, index, Q, p->q), output_of(w, index, K_, p->k),
                        output_of(w, index, V_, p->v)};
  const narrow_rows_t *narrow_rows =
      p->model->draft ? &p->narrow_rows[JOINED] : &w->normed.narrow;
  multiply_modules(w, &(read_t){w->normed.wide, narrow_rows, p->batch->rows, outputs, 3, NULL});
}

static void keep_raw_heads(walk_t *w, int64_t index) {
  const pass_t *p = w->p;
  const kept_t *kept = kept_of(w, index);
  if (!kept || !kept->raw_q) return;
  int64_t q_size = p->model->heads * p->model->head_dim;
  int64_t kv_size = p->model->kv_heads * p->model->head_dim;
  EACH_ROW(w, m, p->batch->rows) {
    memcpy(kept->raw_q + m * q_size, p->q + m * q_size, (size_t)q_size * sizeof(float));
    memcpy(kept->raw_k + m * kv_size, p->k + m * kv_size, (size_t)kv_size * sizeof(float));
  }
  end_stage(w);
}

/* Before any row attends: a row reads the keys of those before it in its sequence, which may be
   another thread's. Where tiles are alone, they do it. */
static void place(walk_t *w, int64_t index) {
  if (!w->p->tiles_place) place_rows(w, layer_of(w, index));
}

static void mix(walk_t *w, int64_t index) { attend(w, layer_of(w, index)); }

static void keep_attention(walk_t *w, int64_t index) {
  const pass_t *p = w->p;
  const kept_t *kept = kept_of(w, index);
  if (!kept) return;
  int64_t q_size = p->model->heads * p->model->head_dim, is_narrow = p->model->is_narrow;
  int64_t kv_size = p->model->kv_heads * p->model->head_dim;
  EACH_ROW(w, m, p->batch->rows) {
    write_numbers(is_narrow, kept->q, m * q_size, p->q + m * q_size, q_size);
    write_numbers(is_narrow, kept->k, m * kv_size, p->k + m * kv_size, kv_size);
    write_numbers(is_narrow, kept->v, m * kv_size, p->v + m * kv_size, kv_size);
    write_numbers(is_narrow, kept->mixed, m * q_size, p->mixed + m * q_size, q_size);
  }
  end_stage(w);
}

static void add_mixed(walk_t *w, int64_t index) {
  const pass_t *p = w->p;
  output_t outputs[] = {added_output(w, index, O, layer_of(w, index)->mixed_norm)};
  multiply_modules(w,
                   &(read_t){p->mixed, &p->narrow_rows[MIXED], p->batch->rows, outputs, 1, NULL});
}

static void add_normed_mixed(walk_t *w, int64_t index) {
  const kept_t *kept = kept_of(w, index);
  const float *weight = layer_of(w, index)->mixed_norm;
  if (weight) add_normed(w, weight, kept ? kept->mixed_out : NULL);
}

static void norm_middle(walk_t *w, int64_t index) {
  const kept_t *kept = kept_of(w, index);
  const layer_t *layer = layer_of(w, index);
  norm_rows(w, layer->mlp_norm, &layer->linear[GATE], kept ? kept->middle : NULL);
}

static void gate(walk_t *w, int64_t index) {
  const pass_t *p = w->p;
  output_t outputs[] = {output_of(w, index, GATE, NULL), output_of(w, index, UP, NULL)};
  const kept_t *kept = kept_of(w, index);
  const normed_t *x = &w->normed;
  output_t down = output_of(w, index, DOWN, NULL);
  multiply_gates(w, &(read_t){x->wide, &x->narrow, p->batch->rows, outputs, 2, NULL}, &down,
                 kept ? kept->gates : NULL);
}

static void add_gated(walk_t *w, int64_t index) {
  const pass_t *p = w->p;
  output_t outputs[] = {added_output(w, index, DOWN, layer_of(w, index)->fed_norm)};
  multiply_modules(w, &(read_t){p->gate, &p->narrow_rows[GATED], p->batch->rows, outputs, 1, NULL});
}

static void add_normed_fed(walk_t *w, int64_t index) {
  const kept_t *kept = kept_of(w, index);
  const float *weight = layer_of(w, index)->fed_norm;
  if (weight) add_normed(w, weight, kept ? kept->fed_out : NULL);
}

static void norm_final(walk_t *w, int64_t index) {
  (void)index;
  const pass_t *p = w->p;
  int64_t d = p->model->hidden;
  EACH_ROW(w, m, p->batch->rows)
    rms_norm(p->x + m * d, p->model->final_norm, d, p->model->eps, p->batch->hidden + m * d);
  end_stage(w);
}

/* ---- the pass */

/* stages: that it has at most; each needs a counter of its tasks. */
typedef struct {
  const char *name;
  void (*take)(walk_t *, int64_t index);
  int stages;
} step_t;

/* In the order of a pass; those of a layer are taken for each layer. */
enum {
  BEGIN, FUSE,
  NORM_INPUT, READ_QUERIES_AND_KEYS, KEEP_RAW_HEADS, PLACE, MIX, KEEP_ATTENTION, ADD_MIXED,
  ADD_NORMED_MIXED, NORM_MIDDLE, GATE_AND_UP, ADD_GATED, ADD_NORMED_FED,
  NORM_FINAL,
  CHOOSE, UNEMBED, CAP_LOGITS,
  CHOOSE_SCORED, SCORE,
  CHOOSE_DRAWN, DRAW,
  CHOOSE_GUESSED, GUESS,
  NUM_STEPS
};

static const step_t steps[NUM_STEPS] = {
    [BEGIN] = {"embed", begin, 1},
    [FUSE] = {"fuse states", fuse_states, 1 + PRODUCT_STAGES},
    [NORM_INPUT] = {"norm before attention", norm_input, 1},
    [READ_QUERIES_AND_KEYS] = {"q, k, v", read_queries_and_keys, PRODUCT_STAGES},
    [KEEP_RAW_HEADS] = {"keep heads", keep_raw_heads, 1},
    [PLACE] = {"rotate, place", place, 1},
    [MIX] = {"attention", mix, 1},
    [KEEP_ATTENTION] = {"keep attention", keep_attention, 1},
    [ADD_MIXED] = {"o", add_mixed, PRODUCT_STAGES},
    [ADD_NORMED_MIXED] = {"norm after attention", add_normed_mixed, 1},
    [NORM_MIDDLE] = {"norm before MLP", norm_middle, 1},
    [GATE_AND_UP] = {"gate, up", gate, PRODUCT_STAGES},
    [ADD_GATED] = {"down", add_gated, PRODUCT_STAGES},
    [ADD_NORMED_FED] = {"norm after MLP", add_normed_fed, 1},
    [NORM_FINAL] = {"final norm", norm_final, 1},
    [CHOOSE] = {"rows of logits", choose, 1},
    [UNEMBED] = {"unembed", unembed, PRODUCT_STAGES},
    [CAP_LOGITS] = {"cap of logits", cap_logits, 1},
    [CHOOSE_SCORED] = {"rows of scores", choose_scored, 1},
    [SCORE] = {"score", score_targets, SCORE_STAGES},
    [CHOOSE_DRAWN] = {"rows to draw from", choose_drawn, 2},
    [DRAW] = {"draw", draw_tokens, SCORE_STAGES},
    [CHOOSE_GUESSED] = {"rows to guess from", choose_guessed, 1},
    [GUESS] = {"guess", guess_tokens, SCORE_STAGES},
};

/* For whoever reads the times of a pass (network.h). */
const int64_t num_steps = NUM_STEPS;
const char *step_name(int64_t step) { return steps[step].name; }

static int64_t stages_of(int first, int last) {
  int64_t stages = 0;
  for (int i = first; i <= last; i++) stages += steps[i].stages;
  return stages;
}

static int64_t stages_of_pass(const pass_t *p) {
  return stages_of(BEGIN, FUSE) + p->model->num_layers * stages_of(NORM_INPUT, ADD_NORMED_FED) +
         stages_of(NORM_FINAL, GUESS) + p->batch->num_captured;
}

static void take_steps(walk_t *w, step_time_t *times, int first, int last, int64_t index) {
  for (int i = first; i <= last; i++) {
    w->end = w->stage + steps[i].stages;
    w->time = times ? &times[i] : NULL;
    int64_t began = times ? nanoseconds() : 0;
    steps[i].take(w, index);
    if (times) times[i].ns += nanoseconds() - began;
  }
  w->time = NULL;
}

/* What layer `number` put out, where it is wanted; a stage for each place where it is. */
static void capture(walk_t *w, int64_t number, const float *outputs) {
  const batch_t *batch = w->p->batch;
  int64_t d = w->p->model->hidden, count = batch->num_captured;
  w->end = w->stage + count;
  for (int64_t c = 0; c < count; c++) {
    if (batch->captured_layers[c] != number) continue;
    EACH_ROW(w, m, batch->rows)
      memcpy(batch->captured + (m * count + c) * d, outputs + m * d, (size_t)d * sizeof(float));
    end_stage(w);
  }
}

static normed_t normed_of(const pass_t *p, int rank) {
  int64_t first = p->num_normed > 1 ? rank * p->batch->rows : 0;
  narrow_rows_t narrow = p->narrow_rows[NORMED];
  if (p->model->is_narrow) narrow.inputs += first * narrow.width;
  return (normed_t){p->normed + first * p->model->hidden, narrow};
}

static void run(team_t *team, int rank, void *argument) {
  const pass_t *p = argument;
  const batch_t *batch = p->batch;
  int64_t num_layers = p->model->num_layers;
  walk_t walk = {.p = p, .team = team, .rank = rank, .normed = normed_of(p, rank)}, *w = &walk;
  step_time_t *times = rank == 0 ? batch->times : NULL;
  take_steps(w, times, BEGIN, BEGIN, 0);
  if (batch->states) take_steps(w, times, FUSE, FUSE, 0);
  for (int64_t i = batch->first_layer; i < batch->end_layer; i++) {
    take_steps(w, times, NORM_INPUT, ADD_NORMED_FED, i);
    if (i + 1 < num_layers) capture(w, i + 1, p->x);
  }
  if (batch->first_layer < num_layers && batch->end_layer == num_layers && batch->hidden) {
    take_steps(w, times, NORM_FINAL, NORM_FINAL, 0);
    capture(w, num_layers, batch->hidden);
  }
  if (batch->num_logit_rows) take_steps(w, times, CHOOSE, CAP_LOGITS, 0);
  if (batch->scores) take_steps(w, times, CHOOSE_SCORED, SCORE, 0);
  if (batch->drawing) take_steps(w, times, CHOOSE_DRAWN, DRAW, 0);
  if (batch->guesses) take_steps(w, times, CHOOSE_GUESSED, GUESS, 0);
}

static int64_t largest_rank(const pass_t *p) {
  int64_t largest = 0;
  for (int64_t s = 0; s < p->batch->num_segments; s++)
    for (int64_t i = 0; i <= p->model->num_layers * NUM_LINEAR; i++)
      largest = MAX(largest, p->batch->segments[s].modules[i].rank);
  return largest;
}

/* Puts the arrays of a pass behind each other in `memory`, each from a cache line's start on; returns
   how many floats they take. */
static int64_t lay_out(pass_t *p, int threads, float *memory) {
  const model_t *model = p->model;
  int64_t rows = p->batch->rows, floats = 0;
  int64_t q_size = model->heads * model->head_dim, kv_size = model->kv_heads * model->head_dim;
  int64_t normed = p->num_normed * model->hidden;
  int64_t sizes[] = {model->hidden, normed,       q_size,        kv_size,      kv_size,
                     q_size,        model->inner, p->low_stride, model->hidden};
  float **places[] = {&p->x,     &p->normed, &p->q,   &p->k,      &p->v,
                      &p->mixed, &p->gate,   &p->low, &p->chosen};
  static_assert(COUNT(sizes) == COUNT(places), "an array of a pass has no size");
  for (int i = 0; i < COUNT(places); i++) {
    *places[i] = memory + floats;
    floats += rounded_up(sizes[i] * rows, LINE);
  }
  const linear_t *first = model->layers[0].linear; /* those of other layers are as wide */
  const linear_t *readers[NARROW_ROWS] = {
      [NORMED] = &first[GATE], [MIXED] = &first[O],  [GATED] = &first[DOWN],
      [CHOSEN] = &model->head, [JOINED] = &first[Q], [STATES] = model->draft ? &model->draft->fuse : NULL};
  for (int i = 0; i < num_narrow_rows(model); i++) {
    int64_t in = readers[i]->in, width = readers[i]->width;
    int64_t count = i == NORMED ? p->num_normed * rows : rows;
    p->narrow_rows[i] = (narrow_rows_t){(narrow *)(memory + floats), in, width};
    floats += width / 2 * count;
  }
  p->gates = memory + floats;
  floats += rounded_up(threads * gates_size(p), LINE);
  int64_t scored = p->batch->scores ? p->batch->scores->num_rows : 0;
  int64_t drawn = p->batch->drawing ? p->batch->drawing->num_rows : 0;
  int64_t guessed = p->batch->guesses ? p->batch->guesses->num_rows : 0;
  if (scored || drawn || guessed) {
    p->tiles = memory + floats;
    floats += threads * SCORE_ROWS * PARTITION;
  }
  if (guessed) {
    p->guesses = (guess_t *)(memory + floats);
    int64_t guesses = guessed * partitions_of(model->vocab);
    floats += rounded_up(guesses * (int64_t)(sizeof *p->guesses / sizeof *memory), LINE);
  }
  if (scored || drawn) {
    int64_t sums = MAX(scored, drawn) * partitions_of(model->vocab);
    p->partitions = (partition_t *)(memory + floats);
    floats += rounded_up(sums * (int64_t)(sizeof *p->partitions / sizeof *memory), LINE);
  }
  if (drawn) {
    p->bounds = (_Atomic double *)(memory + floats);
    floats += rounded_up(drawn * (int64_t)(sizeof *p->bounds / sizeof *memory), LINE);
    p->offers = (offers_t *)(memory + floats);
    int64_t offers = drawn * partitions_of(model->vocab);
    floats += rounded_up(offers * (int64_t)(sizeof *p->offers / sizeof *memory), LINE);
  }
  return floats;
}

/* A pass, or a part of it. 0, or -1 when there is no memory. Keys and values of the rows are written into their blocks. */
int forward(team_t *team, const model_t *model, const batch_t *batch) {
  pass_t p = {.model = model, .batch = batch};
  p.max_rank = (largest_rank(&p) + LINE - 1) / LINE * LINE; /* whole cache lines for each thread */
  p.low_stride = 3 * p.max_rank;
  p.num_normed = batch->rows * model->hidden <= OWN_NORMS && !batch->kept ? team->size : 1;
  int has_layers = batch->first_layer < batch->end_layer; /* else there may be no positions */
  p.tiles_place = has_layers && !batch->kept && tiles_are_alone(&p);
  float *memory = scratch(team, (size_t)lay_out(&p, team->size, NULL) * sizeof(float));
  p.next_task = calloc((size_t)stages_of_pass(&p), sizeof(atomic_long));
  int failed = memory == NULL || p.next_task == NULL;
  if (!failed) {
    lay_out(&p, team->size, memory);
    if (batch->x) p.x = batch->x;
    work(team, run, &p);
  }
  free(p.next_task);
  return failed ? -1 : 0;
}
