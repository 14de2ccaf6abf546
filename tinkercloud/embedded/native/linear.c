/* Products with the network's matrices, and with the adapters' beside them, for forward.c.

   An adapter's B A x is added to what its module has put out, columns by columns, by the thread
   that has just computed these: so every number of y is written by one thread, in one order. */

#include "pass.h"
#include "row_product.h"

/* Segments over the `logit_rows` instead of the batch's. */
static segment_t over_logit_rows(const pass_t *p, const segment_t *segment) {
  int64_t first = 0, end = 0;
  for (int64_t i = 0; i < p->batch->num_logit_rows; i++) {
    first += p->batch->logit_rows[i] < segment->first;
    end += p->batch->logit_rows[i] < segment->first + segment->count;
  }
  return (segment_t){first, end - first, segment->scale, segment->modules};
}

static int has_adapter(const pass_t *p, const output_t *outputs, int count) {
  for (int64_t s = 0; s < p->batch->num_segments; s++)
    for (int i = 0; i < count; i++)
      if (p->batch->segments[s].modules[outputs[i].module].a) return 1;
  return 0;
}

static segment_t segment_of(const pass_t *p, const read_t *read, int64_t s) {
  segment_t segment = p->batch->segments[s];
  return read->over_logit_rows ? over_logit_rows(p, &segment) : segment;
}

/* x A^T of every row and module, side by side in p->low; a stage before the products, of which each
   task reads all ranks of its rows. Tasks are whole cache lines of a row's ranks. */
static void low_rank(walk_t *w, const read_t *read) {
  const pass_t *p = w->p;
  int64_t in = read->outputs[0].linear->in;
  int64_t parts = (p->max_rank + SOME_COLUMNS - 1) / SOME_COLUMNS;
  int64_t tasks = p->batch->num_segments * read->count * parts;
  for (int64_t task; (task = take(w)) < tasks;) {
    int64_t i = task / parts % read->count, first = task % parts * SOME_COLUMNS;
    segment_t segment = segment_of(p, read, task / parts / read->count);
    const lora_t *lora = &segment.modules[read->outputs[i].module];
    if (!lora->a || first >= lora->rank) continue;
    product_t down = {.x = read->x + segment.first * in, .x_stride = in, .rows = segment.count,
                      .w = lora->a, .k = in, .bias = NULL,
                      .y = p->low + segment.first * p->low_stride + i * p->max_rank,
                      .y_stride = p->low_stride, .add = 0, .scale = 1.0f};
    multiply(&down, (range_t){first, MIN(first + SOME_COLUMNS, lora->rank)});
  }
  end_stage(w);
}

/* The rows by strips, where that pays. */
static int pack(walk_t *w, const read_t *read) {
  int64_t in = read->outputs[0].linear->in;
  if (w->p->model->is_narrow || !by_strips(read->rows, in)) return 0;
  for (int64_t strip; (strip = take(w)) < strips_of(read->rows);)
    pack_strip(read->x, in, read->rows, in, strip, w->p->packed);
  end_stage(w);
  return 1;
}

/* What is done to the rows before their products. */
typedef struct {
  int adapted, packed;
} ready_t;

static ready_t prepare(walk_t *w, const read_t *read) {
  ready_t ready = {has_adapter(w->p, read->outputs, read->count), pack(w, read)};
  if (ready.adapted) low_rank(w, read);
  return ready;
}

/* Some columns of one module. */
static void columns(const pass_t *p, const read_t *read, int i, range_t cols, ready_t ready) {
  const output_t *o = &read->outputs[i];
  int is_narrow = read->x_narrow != NULL;
  product_t main = {.x = is_narrow ? (const void *)read->x_narrow : read->x,
                    .x_stride = o->linear->in, .rows = read->rows,
                    .packed = ready.packed ? p->packed : NULL, .is_narrow = is_narrow,
                    .w = o->linear->weight, .k = o->linear->in, .bias = o->linear->bias,
                    .y = o->y, .y_stride = o->y_stride, .add = o->add, .scale = 1.0f};
  multiply(&main, cols);
  for (int64_t s = 0; ready.adapted && s < p->batch->num_segments; s++) {
    segment_t segment = segment_of(p, read, s);
    const lora_t *lora = &segment.modules[o->module];
    if (!lora->a) continue;
    product_t up = {.x = p->low + segment.first * p->low_stride + i * p->max_rank,
                    .x_stride = p->low_stride, .rows = segment.count, .w = lora->b,
                    .k = lora->rank, .bias = NULL, .y = o->y + segment.first * o->y_stride,
                    .y_stride = o->y_stride, .add = 1, .scale = segment.scale};
    multiply(&up, cols);
  }
}

static int64_t width_of(const pass_t *p, const read_t *read) {
  size_t bytes = p->model->is_narrow ? sizeof(narrow) : sizeof(float);
  return task_columns(read->outputs[0].linear->in, (int64_t)bytes);
}

/* One or more modules that read the same rows, block of columns by block of columns. */
void multiply_modules(walk_t *w, const read_t *read) {
  ready_t ready = prepare(w, read);
  int64_t width = width_of(w->p, read);
  for (int64_t task; ; ) {
    task = take(w);
    int i = 0;
    for (; i < read->count; i++) {
      int64_t blocks = (read->outputs[i].linear->out + width - 1) / width;
      if (task < blocks) break;
      task -= blocks;
    }
    if (i == read->count) break;
    int64_t end = MIN((task + 1) * width, read->outputs[i].linear->out);
    columns(w->p, read, i, (range_t){task * width, end}, ready);
  }
  end_stage(w);
}

/* silu(gate) * up into gate, on some columns. exp_vec ends at 88: a gate below -87 is divided by
   what -87 would be, which no sum that it is part of can tell from zero. */
static void swiglu(const pass_t *p, range_t cols) {
  int64_t inner = p->model->inner;
  for (int64_t m = 0; m < p->batch->rows; m++) {
    float *gate = p->gate + m * inner, *up = p->up + m * inner;
    int64_t i = cols.first;
    for (; i + LANES <= cols.end; i += LANES) {
      vec g = load(gate + i), most = all(87.0f);
      ivec above = -g > most;
      vec e = exp_vec((vec)(((ivec)-g & ~above) | ((ivec)most & above)));
      store(gate + i, g / (all(1.0f) + e) * load(up + i));
    }
    for (; i < cols.end; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    if (p->model->is_narrow)
      round_to_narrow(gate + cols.first, cols.end - cols.first,
                      p->gate_narrow + m * inner + cols.first);
  }
}

/* Gate and up, and what comes of them, of the same columns by the same thread while they are in its
   cache. `down` reads whole rows and so has to wait for the stage's end. */
void multiply_gates(walk_t *w, const read_t *read) {
  ready_t ready = prepare(w, read);
  int64_t width = width_of(w->p, read), inner = w->p->model->inner;
  for (int64_t first; (first = take(w) * width) < inner;) {
    range_t cols = {first, MIN(first + width, inner)};
    columns(w->p, read, 0, cols, ready);
    columns(w->p, read, 1, cols, ready);
    swiglu(w->p, cols);
  }
  end_stage(w);
}

/* Of memory, for the rows that a product reads, by strips. */
int64_t packed_floats(const model_t *model, int64_t rows, int64_t widest) {
  return model->is_narrow || rows < MANY_ROWS ? 0 : packed_size(rows, widest);
}
