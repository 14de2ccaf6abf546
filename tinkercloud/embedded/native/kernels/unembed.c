/* The end of a pass: logits, or what is wanted of them. */

#include "activations.h"
#include "log_sum_exp.h"
#include "pass.h"
#include "product.h"

/* Some rows after the final norm, side by side. */
void choose_rows(walk_t *w, const int64_t *rows, int64_t count) {
  const pass_t *p = w->p;
  int64_t d = p->model->hidden;
  EACH_ROW(w, i, count) {
    memcpy(p->chosen + i * d, p->batch->hidden + rows[i] * d, (size_t)d * sizeof(float));
    if (p->model->is_narrow)
      round_inputs(&p->model->head, &p->narrow_rows[CHOSEN], i, 0, d, p->chosen + i * d);
  }
  end_stage(w);
}

static output_t head_output(const pass_t *p, float *y) {
  int module = (int)p->model->num_layers * NUM_LINEAR;
  return (output_t){&p->model->head, module, y, p->model->vocab, 0, 1.0f};
}

void choose(walk_t *w, int64_t index) {
  (void)index;
  choose_rows(w, w->p->batch->logit_rows, w->p->batch->num_logit_rows);
}

void unembed(walk_t *w, int64_t index) {
  (void)index;
  const pass_t *p = w->p;
  const batch_t *batch = p->batch;
  output_t outputs[] = {head_output(p, batch->logits)};
  multiply_modules(w, &(read_t){p->chosen, &p->narrow_rows[CHOSEN], batch->num_logit_rows, outputs,
                                1, batch->logit_rows});
}

void cap_logits(walk_t *w, int64_t index) {
  (void)index;
  const pass_t *p = w->p;
  int64_t vocab = p->model->vocab;
  float cap = p->model->logit_cap;
  if (cap == 0.0f) return;
  EACH_ROW(w, i, p->batch->num_logit_rows) cap_numbers(p->batch->logits + i * vocab, vocab, cap);
  end_stage(w);
}

/* ---- without the logits of a row: of some rows and a partition of the vocabulary logits are
   computed, summed and read while they are in a cache. The sums are those of `log_sum_exp` over
   whole rows, to the bit: partitions lie at the same places, and are added up in one order. */

#define GROUP_TILES 2 /* that meet a partition's weights before the next one does */

static void visit_tile(const walk_t *w, const read_t *read, range_t rows, int64_t part,
                       const void *next, int adapted, visit_t *visit) {
  range_t tokens = partition_at(w->p->model->vocab, part);
  float *tile = w->p->tiles + w->rank * SCORE_ROWS * PARTITION;
  output_t output = read->outputs[0];
  output.y_stride = PARTITION;
  output.y = tile - (rows.first * PARTITION + tokens.first); /* so that row and token index it */
  read_t own = *read;
  own.outputs = &output;
  range_t panels = {tokens.first / PANEL, panels_of(tokens.end)};
  multiply_part(w->p, &own, 0, rows, panels, next, adapted);
  for (int64_t m = rows.first; m < rows.end; m++) {
    float *logits = tile + (m - rows.first) * PARTITION, cap = w->p->model->logit_cap;
    if (cap != 0.0f) cap_numbers(logits, tokens.end - tokens.first, cap);
    visit(w, m, part, logits);
  }
}

/* Of rows that were chosen. A stage more than a product has. */
void visit_partitions(walk_t *w, const int64_t *chosen, int64_t num_rows, visit_t *visit) {
  const pass_t *p = w->p;
  output_t outputs[] = {head_output(p, NULL)};
  const read_t *read =
      &(read_t){p->chosen, &p->narrow_rows[CHOSEN], num_rows, outputs, 1, chosen};
  int64_t count = partitions_of(p->model->vocab), group = GROUP_TILES * SCORE_ROWS;
  int adapted = multiply_low_rank(w, read);
  int64_t tasks = parts(num_rows, group) * count;
  for (int64_t task; (task = take(w)) < tasks;) {
    range_t rows = part_of(num_rows, group, task / count);
    int64_t later = task + w->team->size, panel = later % count * (PARTITION / PANEL);
    const void *next = later < tasks ? panel_of(p->model, &p->model->head, panel) : NULL;
    for (int64_t first = rows.first; first < rows.end; first += SCORE_ROWS)
      visit_tile(w, read, (range_t){first, MIN(first + SCORE_ROWS, rows.end)}, task % count,
                 first + SCORE_ROWS < rows.end ? NULL : next, adapted, visit);
  }
  end_stage(w);
}

/* ---- targets */

static void keep_sums(const walk_t *w, int64_t row, int64_t part, float *logits) {
  const scores_t *scores = w->p->batch->scores;
  int64_t size = w->p->model->vocab;
  range_t tokens = partition_at(size, part);
  w->p->partitions[row * partitions_of(size) + part] =
      sum_partition(logits, tokens.end - tokens.first);
  for (int64_t t = scores->starts[row]; t < scores->starts[row + 1]; t++)
    if (scores->ids[t] >= tokens.first && scores->ids[t] < tokens.end)
      scores->logits[t] = logits[scores->ids[t] - tokens.first];
}

void choose_scored(walk_t *w, int64_t index) {
  (void)index;
  choose_rows(w, w->p->batch->scores->rows, w->p->batch->scores->num_rows);
}

void score_targets(walk_t *w, int64_t index) {
  (void)index;
  const scores_t *scores = w->p->batch->scores;
  int64_t count = partitions_of(w->p->model->vocab);
  visit_partitions(w, scores->rows, scores->num_rows, keep_sums);
  EACH_ROW(w, m, scores->num_rows)
    scores->norms[m] = combine_partitions(w->p->partitions + m * count, count);
  end_stage(w);
}
