/* Products with the network's matrices, and with the adapters' beside them, for forward.c.

   An adapter's B A x is added to what its module has put out, panel by panel, by the thread that
   has just computed these: so every number of y is written by one thread, in one order. */

#include "activations.h"
#include "packing.h"
#include "pass.h"
#include "product.h"

#define LOW_RANK_ROWS 32 /* that a task takes */
#define LOW_RANK_PANELS 3
#define PLACES_AHEAD 8   /* rows */
#define MOST_OUTPUTS 3   /* modules that read the same rows */

/* Segments over the chosen rows instead of the batch's. */
static segment_t over_chosen(const read_t *read, const segment_t *segment) {
  int64_t first = 0, end = 0;
  for (int64_t i = 0; i < read->rows; i++) {
    first += read->chosen[i] < segment->first;
    end += read->chosen[i] < segment->first + segment->count;
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
  return read->chosen ? over_chosen(read, &segment) : segment;
}

/* Rows of a segment that are among `rows`. */
static range_t rows_of(const segment_t *segment, range_t rows) {
  return (range_t){MAX(rows.first, segment->first),
                   MIN(rows.end, segment->first + segment->count)};
}

/* x A^T of every row and module, side by side in p->low; a stage before the products, of which each
   task reads all ranks of its rows. Tasks are a panel of some rows, or of many a few panels: then
   there are tasks enough, and inputs are read once for them. */
static void low_rank(walk_t *w, const read_t *read) {
  const pass_t *p = w->p;
  int64_t in = read->outputs[0].linear->in, together = read->rows < BIG_BATCH ? 1 : LOW_RANK_PANELS;
  int64_t panel_tasks = parts(panels_of(p->max_rank), together);
  int64_t blocks = parts(read->rows, LOW_RANK_ROWS);
  int64_t per_segment = read->count * panel_tasks * blocks;
  for (int64_t task; (task = take(w)) < p->batch->num_segments * per_segment;) {
    int64_t s = task / per_segment, block = task % blocks;
    int64_t i = task / blocks / panel_tasks % read->count;
    const lora_t *lora = &p->batch->segments[s].modules[read->outputs[i].module];
    range_t panels = part_of(panels_of(lora->rank), together, task / blocks % panel_tasks);
    if (!lora->a || panels.first >= panels.end) continue;
    segment_t segment = segment_of(p, read, s);
    range_t rows = rows_of(&segment, part_of(read->rows, LOW_RANK_ROWS, block));
    product_t down = {.x = read->x, .x_stride = in, .w = lora->a, .k = in, .out = lora->rank,
                      .y = p->low + i * p->max_rank, .y_stride = p->low_stride, .scale = 1.0f};
    multiply(&down, rows, panels);
  }
  end_stage(w);
}

int multiply_low_rank(walk_t *w, const read_t *read) {
  int adapted = has_adapter(w->p, read->outputs, read->count);
  if (adapted) low_rank(w, read);
  return adapted;
}

const void *panel_of(const model_t *model, const linear_t *linear, int64_t panel) {
  return weight_at(linear->weight, model->is_narrow, linear->width, panel * PANEL);
}

void multiply_part(const pass_t *p, const read_t *read, int i, range_t rows, range_t panels,
                   const void *next, int adapted) {
  const output_t *o = &read->outputs[i];
  int is_narrow = (int)p->model->is_narrow;
  product_t main = {.x = is_narrow ? (const void *)read->narrow_rows->inputs : read->x,
                    .x_stride = o->linear->width, .is_narrow = is_narrow,
                    .w = o->linear->weight, .next = next, .k = o->linear->width,
                    .out = o->linear->out, .bias = o->linear->bias, .y = o->y,
                    .y_stride = o->y_stride, .add = o->add, .scale = o->scale};
  multiply(&main, rows, panels);
  for (int64_t s = 0; adapted && s < p->batch->num_segments; s++) {
    const lora_t *lora = &p->batch->segments[s].modules[o->module];
    if (!lora->a) continue;
    segment_t segment = segment_of(p, read, s);
    product_t up = {.x = p->low + i * p->max_rank, .x_stride = p->low_stride, .w = lora->b,
                    .k = lora->rank, .out = o->linear->out, .y = o->y, .y_stride = o->y_stride,
                    .add = 1, .scale = segment.scale * o->scale};
    multiply(&up, rows_of(&segment, rows), panels);
  }
}

static cut_t cut_of(const pass_t *p, const read_t *read, int i) {
  const linear_t *linear = read->outputs[i].linear;
  return cut_product(read->rows, p->model->is_narrow, linear->width, linear->out);
}

/* Modules cut into tasks, rows by rows and panels by panels. */
typedef struct {
  const read_t *read;
  cut_t cuts[MOST_OUTPUTS];
  int64_t per_rows, tasks;
} tasks_t;

typedef struct {
  int i; /* of the modules */
  range_t rows, panels;
} task_t;

static tasks_t tasks_of(const pass_t *p, const read_t *read) {
  tasks_t all = {.read = read};
  assert(read->count <= MOST_OUTPUTS);
  for (int i = 0; i < read->count; i++) {
    all.cuts[i] = cut_of(p, read, i);
    all.per_rows += all.cuts[i].panel_tasks;
  }
  all.tasks = all.cuts[0].row_tasks * all.per_rows; /* rows are cut alike in all, as they are read */
  return all;
}

static task_t task_at(const tasks_t *all, int64_t index) {
  int64_t part = index % all->per_rows;
  int i = 0;
  while (part >= all->cuts[i].panel_tasks) part -= all->cuts[i++].panel_tasks;
  const linear_t *linear = all->read->outputs[i].linear;
  return (task_t){i, part_of(all->read->rows, all->cuts[i].rows, index / all->per_rows),
                  part_of(panels_of(linear->out), all->cuts[i].panels, part)};
}

/* One or more modules that read the same rows. */
void multiply_modules(walk_t *w, const read_t *read) {
  int adapted = multiply_low_rank(w, read);
  const tasks_t all = tasks_of(w->p, read);
  for (int64_t index; (index = take(w)) < all.tasks;) {
    task_t task = task_at(&all, index);
    int64_t later = index + w->team->size; /* what this thread probably has next */
    const void *next = NULL;
    if (later < all.tasks) {
      task_t then = task_at(&all, later);
      next = panel_of(w->p->model, read->outputs[then.i].linear, then.panels.first);
    }
    multiply_part(w->p, read, task.i, task.rows, task.panels, next, adapted);
  }
  end_stage(w);
}

/* Where gate and up of row m and column i are: [m * stride + i]. */
typedef struct {
  float *gate, *up;
  int64_t stride;
} gates_t;

/* The places of row m that gate_rows writes to, before it does: they are in no cache. */
static void fetch_places(const pass_t *p, int64_t m, range_t cols, int is_wide, char *kept) {
  int64_t inner = p->model->inner, size = number_bytes(p->model->is_narrow);
  for (int64_t i = cols.first; is_wide && i < cols.end; i += LINE)
    __builtin_prefetch(p->gate + m * inner + i, 1);
  for (int64_t at = cols.first * size; kept && at < cols.end * size; at += LINE_BYTES) {
    __builtin_prefetch(kept + 2 * m * inner * size + at, 1);
    __builtin_prefetch(kept + (2 * m + 1) * inner * size + at, 1);
  }
}

/* The gated product on some columns. down: what reads it; is_wide: as floats, of p->gate. kept: see
   multiply_gates. */
static void gate_rows(const pass_t *p, const linear_t *down, const gates_t *gates, range_t rows,
                      range_t cols, int is_wide, void *kept) {
  int64_t inner = p->model->inner, activation = p->model->activation;
  for (int64_t m = rows.first; m < rows.end; m++) {
    float *gate = gates->gate + m * gates->stride, *up = gates->up + m * gates->stride;
    float *product = is_wide ? p->gate + m * inner : gate;
    int64_t i = cols.first, is_narrow = p->model->is_narrow;
    if (m + PLACES_AHEAD < rows.end) fetch_places(p, m + PLACES_AHEAD, cols, is_wide, kept);
    if (kept) {
      write_numbers(is_narrow, kept, 2 * m * inner + i, gate + i, cols.end - i);
      write_numbers(is_narrow, kept, (2 * m + 1) * inner + i, up + i, cols.end - i);
    }
    for (; i + LANES <= cols.end; i += LANES)
      store(product + i, gated(activation, load(gate + i), load(up + i)));
    for (; i < cols.end; i++) product[i] = gated1(activation, gate[i], up[i]);
    if (is_narrow) {
      int64_t first = cols.first, count = cols.end - cols.first;
      round_inputs(down, &p->narrow_rows[GATED], m, first, count, product + first);
    }
  }
}

/* A thread's own memory for a task's gates, with an odd number of cache lines a row: rows that are a
   power of two apart would share a few places of the cache. */
static int64_t task_stride(const cut_t *cut) { return (cut->panels | 1) * PANEL; }

int64_t gates_size(const pass_t *p) {
  const linear_t *linear = &p->model->layers[0].linear[GATE];
  cut_t cut = cut_product(p->batch->rows, p->model->is_narrow, linear->width, linear->out);
  return 2 * cut.rows * task_stride(&cut);
}

static gates_t gates_of(const walk_t *w, const cut_t *cut, range_t rows, range_t cols) {
  float *own = w->p->gates + w->rank * gates_size(w->p);
  int64_t stride = task_stride(cut), start = rows.first * stride + cols.first;
  return (gates_t){own - start, own + cut->rows * stride - start, stride};
}

/* Gate and up, and what comes of them, of the same columns by the same thread while they are in its
   cache. `down` reads whole rows and so has to wait for the stage's end. kept: where both are kept
   side by side, numbers [rows][2 F], or NULL. */
void multiply_gates(walk_t *w, const read_t *read, const output_t *down, void *kept) {
  const pass_t *p = w->p;
  int adapted = multiply_low_rank(w, read);
  int is_wide = !p->model->is_narrow || has_adapter(p, down, 1);
  int64_t inner = p->model->inner;
  cut_t cut = cut_of(p, read, 0);
  output_t outputs[] = {read->outputs[0], read->outputs[1]};
  read_t own = *read;
  own.outputs = outputs;
  int64_t tasks = cut.row_tasks * cut.panel_tasks;
  for (int64_t task; (task = take(w)) < tasks;) {
    int64_t later = task + w->team->size, panel = later % cut.panel_tasks * cut.panels;
    range_t rows = part_of(read->rows, cut.rows, task / cut.panel_tasks);
    range_t panels = part_of(panels_of(inner), cut.panels, task % cut.panel_tasks);
    range_t cols = {panels.first * PANEL, MIN(panels.end * PANEL, inner)};
    gates_t gates = gates_of(w, &cut, rows, cols);
    outputs[0].y = gates.gate;
    outputs[1].y = gates.up;
    outputs[0].y_stride = outputs[1].y_stride = gates.stride;
    multiply_part(p, &own, 0, rows, panels, panel_of(p->model, outputs[1].linear, panels.first),
                  adapted);
    multiply_part(p, &own, 1, rows, panels,
                  later < tasks ? panel_of(p->model, outputs[0].linear, panel) : NULL, adapted);
    gate_rows(p, down->linear, &gates, rows, cols, is_wide, kept);
  }
  end_stage(w);
}
