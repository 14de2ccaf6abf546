/* The gradient of linear modules that read the same rows (linear.c), for linear_gradient.py:
     dx = sum of dy W + scale dy B A over the modules,
     dA += scale (dy B)^T x,    dB += scale dy^T (A x) of each segment's adapter.
   A x is computed again.

   Products read numbers of the model's type: where it is narrow, dy, x, A x, dy B and the factors are
   rounded. Sums are float, those over outputs piece by piece, those over rows of one segment from
   its first row on: a segment's gradients depend on nothing but its own rows.

   Of many outputs a piece at a time is computed, so that what is between lies in a cache and takes
   no memory to speak of. Names: T rows, D inputs, N outputs of a piece, R ranks of the modules side
   by side; `numbers` are float or narrow, rows of them are of row_size. */

#include "linear_gradient.h"

#define KEPT_BYTES (256ul * 1024 * 1024) /* of scratch memory, between calls */

/* ---- first stage: weights turned, adapters packed */

static void pack_a(const call_t *c, const adapter_t *adapter) {
  const linear_gradient_t *g = c->g;
  const segment_gradient_t *s = adapter->segment;
  for (int64_t r = 0; r < adapter->width; r++) {
    const float *a = s->modules[r / s->rank].a;
    char *row = row_of(c, adapter->a_rows, r, g->in);
    if (a)
      round_row(g->is_narrow, a + r % s->rank * g->in, g->in, row);
    else
      memset(row, 0, (size_t)row_bytes(c, g->in));
  }
  int64_t in = row_size(g->is_narrow, g->in);
  matrix_t rows = {g->is_narrow, adapter->width, in, in};
  for (int64_t i = 0; i < panels_of(adapter->width); i++)
    pack_panel(&rows, i, adapter->a_rows, adapter->a);
  pack_inputs(g->is_narrow,
              &(rows_t){adapter->a_rows, row_bytes(c, g->in), adapter->width, g->in},
              adapter->a_turned, panel_bytes(g->is_narrow, adapter->width));
}

static void pack_b(const call_t *c, const adapter_t *adapter, int i) {
  const piece_t *piece = &c->pieces[i];
  const segment_gradient_t *s = adapter->segment;
  const float *b = s->modules[piece->module].b;
  float scaled[s->rank];
  for (int64_t n = 0; n < piece->out; n++) {
    for (int64_t r = 0; r < s->rank; r++)
      scaled[r] = b ? s->scale * b[(piece->first + n) * s->rank + r] : 0.0f;
    round_row(c->g->is_narrow, scaled, s->rank, row_of(c, adapter->b_rows[i], n, s->rank));
  }
  pack_inputs(c->g->is_narrow,
              &(rows_t){adapter->b_rows[i], row_bytes(c, s->rank), piece->out, s->rank},
              adapter->b_turned[i], panel_bytes(c->g->is_narrow, piece->out));
}

static void prepare(call_t *c) {
  const linear_gradient_t *g = c->g;
  int64_t of_adapter = c->num_pieces + c->is_first, panels = g->dx ? panels_of(g->in) : 0;
  int64_t adapted = g->num_segments * of_adapter, tasks = adapted + c->num_pieces * panels;
  for (int64_t task; (task = atomic_fetch_add(&c->next[0], 1)) < tasks;) {
    if (task < adapted) {
      int64_t i = task % of_adapter;
      const adapter_t *adapter = &c->adapters[task / of_adapter];
      if (i < c->num_pieces)
        pack_b(c, adapter, (int)i);
      else
        pack_a(c, adapter);
      continue;
    }
    const piece_t *piece = &c->pieces[(task - adapted) / panels];
    int64_t panel = (task - adapted) % panels;
    matrix_t weights = {g->is_narrow, piece->out, g->in, g->modules[piece->module].width};
    turn_panel(&weights, panel, piece->weight,
               piece->turned + panel * panel_bytes(g->is_narrow, piece->out));
  }
}

/* ---- second stage: rows */

static void softmax_row(const call_t *c, const piece_t *piece, int64_t row, float *out) {
  const linear_gradient_t *g = c->g;
  const softmax_gradient_t *softmax = g->softmax;
  const float *logits = g->dy + row * g->dy_row + piece->first;
  const double *norms = softmax->norms;
  vec norm = all(norms ? (float)norms[row] : 0.0f), slope = all(-softmax->totals[row]);
  for (int64_t i = 0; i < piece->out; i += LANES) {
    vec x = some_numbers(0, logits, i, piece->out - i);
    store_some(out + i, (norms ? exp_vec(x - norm) : x) * slope, piece->out - i);
  }
  for (int64_t t = softmax->starts[row]; t < softmax->starts[row + 1]; t++) {
    int64_t at = softmax->ids[t] - piece->first;
    if (at >= 0 && at < piece->out) out[at] += softmax->gradients[t];
  }
}

/* Where a piece's row of dy is computed: in its place, or, to be rounded into that, in `own`. */
static float *computed_at(const call_t *c, const piece_t *piece, int64_t row, float *own) {
  return c->g->is_narrow ? own : (float *)row_of(c, piece->rounded, row, piece->out);
}

static void round_piece(const call_t *c, const piece_t *piece, int64_t row, const float *dy) {
  char *place = row_of(c, piece->rounded, row, piece->out);
  if ((const char *)dy != place) round_row(c->g->is_narrow, dy, piece->out, place);
}

/* Where there are pieces of gate and of up, both are whole. */
static void round_gates(const call_t *c, int64_t row, float *own) {
  const linear_gradient_t *g = c->g;
  const piece_t *of[2] = {}, *some = c->pieces;
  for (int i = 0; i < c->num_pieces; i++) of[c->pieces[i].module] = &c->pieces[i];
  gates_t gates = {g->is_narrow, g->activation, g->modules[0].out, g->dy_gates};
  float *dgate = of[0] ? computed_at(c, of[0], row, own) : NULL;
  float *dup = of[1] ? computed_at(c, of[1], row, own + (of[0] ? some->out : 0)) : NULL;
  gate_gradient_part(&gates, row, (range_t){some->first, some->first + some->out}, g->dy, dgate,
                     dup);
  if (of[0]) round_piece(c, of[0], row, dgate);
  if (of[1]) round_piece(c, of[1], row, dup);
}

static void round_dy(const call_t *c, int64_t row, float *own) {
  const linear_gradient_t *g = c->g;
  if (g->dy_gates) {
    round_gates(c, row, own);
    return;
  }
  for (int i = 0; i < c->num_pieces && c->pieces[i].rounded; i++) {
    const piece_t *piece = &c->pieces[i];
    const float *dy = g->dy + row * g->dy_row + g->modules[piece->module].column + piece->first;
    if (g->softmax) {
      float *at = computed_at(c, piece, row, own);
      softmax_row(c, piece, row, at);
      dy = at;
    }
    round_piece(c, piece, row, dy);
  }
}

static void round_x(const call_t *c, int64_t row, float *own) {
  const linear_gradient_t *g = c->g;
  char *place = row_of(c, c->x, row, g->in);
  float *gated = g->is_narrow ? own : (float *)place;
  if (g->x_gates)
    gate_part(&(gates_t){g->is_narrow, g->activation, g->in, g->x_gates}, row,
              (range_t){0, g->in}, gated);
  const float *x = g->x_gates ? gated : g->x + row * g->in;
  if ((const char *)x != place) round_row(g->is_narrow, x, g->in, place);
}

/* Up to BLOCK_ROWS rows of floats, `stride` apart, and up to PANEL of their columns. */
static void turn_columns(const float *rows, int64_t stride, int64_t count, int64_t width,
                         float columns[PANEL][BLOCK_ROWS]) {
  for (int64_t t = 0; t < count; t += PANEL) {
    block_t in = {}, out;
    for (int64_t i = 0; i < MIN(PANEL, count - t); i++) {
      const float *row = rows + (t + i) * stride;
      if (width == PANEL)
        memcpy(in[i], row, sizeof in[i]); /* of a size that is known: without a call or a loop */
      else
        memcpy(in[i], row, (size_t)width * sizeof *row);
    }
    turn_words(in, out);
    for (int64_t r = 0; r < width; r++) memcpy(&columns[r][t], out[r], sizeof out[r]);
  }
}

/* Rows [count][width] of floats, `stride` apart, into columns of numbers [width][all rows]. */
static void turn_rows(const call_t *c, const float *rows, int64_t stride, range_t at, int64_t width,
                      int64_t all_rows, char *to) {
  int64_t count = at.end - at.first, size = number_bytes(c->g->is_narrow);
  float columns[PANEL][BLOCK_ROWS];
  for (int64_t r = 0; r < width; r++) {
    if (r % PANEL == 0) turn_columns(rows + r, stride, count, MIN(PANEL, width - r), columns);
    const float *column = columns[r % PANEL];
    char *into = row_of(c, to, r, all_rows) + at.first * size;
    if (at.end < all_rows)
      write_numbers(c->g->is_narrow, into, 0, column, count);
    else
      round_row(c->g->is_narrow, column, count, into); /* at.first: whole blocks */
  }
}

static product_t product_of(const call_t *c, const char *x, int64_t x_stride, const char *w,
                            int64_t k, int64_t out) {
  return (product_t){.x = x, .x_stride = x_stride, .w = w, .is_narrow = c->g->is_narrow, .k = k,
                     .out = out, .scale = 1.0f};
}

static const char *x_rows(const call_t *c, int64_t *stride) {
  *stride = row_size(c->g->is_narrow, c->g->in);
  return c->x ? c->x : (const char *)c->g->x;
}

/* A x of some of the segment's rows, and x itself as products over rows read it. */
static void low_rank(const call_t *c, const adapter_t *adapter, range_t at, float *own) {
  const linear_gradient_t *g = c->g;
  int64_t first = adapter->segment->first, count = adapter->segment->count, stride;
  const char *x = x_rows(c, &stride);
  x += (first + at.first) * row_bytes(c, g->in);
  product_t down = product_of(c, x, stride, adapter->a, g->in, adapter->width);
  down.y = own;
  down.y_stride = adapter->width;
  multiply(&down, (range_t){0, at.end - at.first}, (range_t){0, panels_of(adapter->width)});
  turn_rows(c, own, adapter->width, at, adapter->width, count, adapter->low);
  int64_t bytes = panel_bytes(g->is_narrow, count), step = at.first / (g->is_narrow ? 2 : 1);
  pack_inputs(g->is_narrow, &(rows_t){x, row_bytes(c, g->in), at.end - at.first, g->in},
              adapter->x + step * STEP_BYTES, bytes);
}

/* scale dy B, to which each piece adds. */
static void low_rank_gradient(const call_t *c, const adapter_t *adapter, range_t at) {
  const linear_gradient_t *g = c->g;
  const segment_gradient_t *s = adapter->segment;
  range_t rows = {s->first + at.first, s->first + at.end};
  int64_t step = at.first / (g->is_narrow ? 2 : 1), size = number_bytes(g->is_narrow);
  for (int i = 0; i < c->num_pieces; i++) {
    const piece_t *piece = &c->pieces[i];
    product_t down = product_of(c, piece->dy, piece->dy_stride, adapter->b_turned[i], piece->out,
                                s->rank);
    down.y = c->dlow + piece->module * s->rank;
    down.y_stride = c->width;
    down.add = piece->first > 0;
    multiply(&down, rows, (range_t){0, panels_of(s->rank)});
    rows_t dy = {piece->dy + rows.first * piece->dy_stride * size, piece->dy_stride * size,
                 rows.end - rows.first, piece->out};
    pack_inputs(g->is_narrow, &dy, adapter->dy[i] + step * STEP_BYTES,
                panel_bytes(g->is_narrow, s->count));
  }
  if (!c->is_last) return;
  const float *dlow = c->dlow + rows.first * c->width;
  turn_rows(c, dlow, c->width, at, adapter->width, s->count, adapter->dlow);
  if (g->is_narrow)
    for (int64_t r = rows.first; r < rows.end; r++)
      round_row(1, c->dlow + r * c->width, adapter->width, row_of(c, c->dlow_rows, r, c->width));
}

static void ready_rows(call_t *c, const span_t *span, range_t at, float *own) {
  const linear_gradient_t *g = c->g;
  for (int64_t r = span->first + at.first; r < span->first + at.end; r++) {
    round_dy(c, r, own);
    if (c->x && c->is_first && span->adapter) round_x(c, r, own);
  }
  if (!span->adapter) return;
  if (c->is_first) low_rank(c, span->adapter, at, own);
  low_rank_gradient(c, span->adapter, at);
}

static void ready_all(call_t *c, float *own) {
  int64_t tasks = 0;
  for (int64_t s = 0; s < c->num_spans; s++) tasks += parts(c->spans[s].count, BLOCK_ROWS);
  for (int64_t task; (task = atomic_fetch_add(&c->next[1], 1)) < tasks;) {
    const span_t *span = c->spans;
    for (; task >= parts(span->count, BLOCK_ROWS); span++) task -= parts(span->count, BLOCK_ROWS);
    ready_rows(c, span, part_of(span->count, BLOCK_ROWS, task), own);
  }
}

/* ---- third stage: products */

static void input_gradient(const call_t *c, range_t rows, range_t panels) {
  const linear_gradient_t *g = c->g;
  for (int i = 0; i < c->num_pieces; i++) {
    const piece_t *piece = &c->pieces[i];
    product_t back = product_of(c, piece->dy, piece->dy_stride, piece->turned, piece->out, g->in);
    back.y = g->dx;
    back.y_stride = g->in;
    back.add = i > 0 || !c->is_first;
    multiply(&back, rows, panels);
  }
  for (int64_t s = 0; s < g->num_segments && c->is_last; s++) {
    const adapter_t *adapter = &c->adapters[s];
    int64_t first = adapter->segment->first, end = first + adapter->segment->count;
    const char *dlow = g->is_narrow ? c->dlow_rows : (const char *)c->dlow;
    product_t back = product_of(c, dlow, row_size(g->is_narrow, c->width), adapter->a_turned,
                                adapter->width, g->in);
    back.y = g->dx;
    back.y_stride = g->in;
    back.add = 1;
    if (MAX(first, rows.first) < MIN(end, rows.end))
      multiply(&back, (range_t){MAX(first, rows.first), MIN(end, rows.end)}, panels);
  }
}

/* dB of some outputs; segments one after the other, since they may have one adapter. */
static void gradient_of_b(const call_t *c, int i, range_t panels, float *own) {
  const piece_t *piece = &c->pieces[i];
  int64_t first = panels.first * PANEL, count = MIN(panels.end * PANEL, piece->out) - first;
  for (int64_t s = 0; s < c->g->num_segments; s++) {
    const adapter_t *adapter = &c->adapters[s];
    const segment_gradient_t *at = adapter->segment;
    const lora_gradient_t *lora = &at->modules[piece->module];
    if (!lora->b) continue;
    const char *dy = adapter->dy[i] + panels.first * panel_bytes(c->g->is_narrow, at->count);
    const char *low = adapter->low + piece->module * at->rank * row_bytes(c, at->count);
    product_t sum = product_of(c, low, row_size(c->g->is_narrow, at->count), dy, at->count, count);
    sum.y = own;
    sum.y_stride = TASK_PANELS * PANEL;
    multiply(&sum, (range_t){0, at->rank}, (range_t){0, panels.end - panels.first});
    float *db = lora->db + (piece->first + first) * at->rank;
    for (int64_t n = 0; n < count; n++)
      for (int64_t r = 0; r < at->rank; r++)
        db[n * at->rank + r] += at->scale * own[r * TASK_PANELS * PANEL + n];
  }
}

static void gradient_of_a(const call_t *c, int64_t module, range_t panels) {
  for (int64_t s = 0; s < c->g->num_segments; s++) {
    const adapter_t *adapter = &c->adapters[s];
    const segment_gradient_t *at = adapter->segment;
    if (!at->modules[module].a) continue;
    const char *dlow = adapter->dlow + module * at->rank * row_bytes(c, at->count);
    product_t sum = product_of(c, dlow, row_size(c->g->is_narrow, at->count), adapter->x, at->count,
                               c->g->in);
    sum.y = at->modules[module].da;
    sum.y_stride = c->g->in;
    sum.add = 1;
    multiply(&sum, (range_t){0, at->rank}, panels);
  }
}

static void multiply_all(call_t *c, float *own) {
  const linear_gradient_t *g = c->g;
  int64_t outs = 0, of_b[MOST_MODULES], panels = panels_of(g->in);
  int64_t of_a = c->is_last && g->num_segments ? parts(panels, TASK_PANELS) : 0;
  for (int i = 0; i < c->num_pieces; i++) {
    outs = MAX(outs, c->pieces[i].out);
    of_b[i] = g->num_segments ? parts(panels_of(c->pieces[i].out), TASK_PANELS) : 0;
  }
  cut_t cut = cut_product(g->rows, g->is_narrow, outs, g->in);
  int64_t of_x = g->dx ? cut.row_tasks * cut.panel_tasks : 0;
  for (int64_t task; (task = atomic_fetch_add(&c->next[2], 1)) < of_x;)
    input_gradient(c, part_of(g->rows, cut.rows, task / cut.panel_tasks),
                   part_of(panels, cut.panels, task % cut.panel_tasks));
  for (int i = 0; i < c->num_pieces; i++)
    for (int64_t task; (task = atomic_fetch_add(&c->next[3 + i], 1)) < of_b[i];)
      gradient_of_b(c, i, part_of(panels_of(c->pieces[i].out), TASK_PANELS, task), own);
  for (int64_t task; (task = atomic_fetch_add(&c->next[3 + MOST_MODULES], 1)) < of_a * g->num_modules;)
    gradient_of_a(c, task / of_a, part_of(panels, TASK_PANELS, task % of_a));
}

static void run(team_t *team, int rank, void *argument) {
  call_t *c = argument;
  float *own = c->own + rank * c->own_floats;
  prepare(c);
  meet(team);
  ready_all(c, own);
  meet(team);
  multiply_all(c, own);
}

/* 0, or -1 when there is no memory. */
int linear_gradient(team_t *team, const linear_gradient_t *g) {
  call_t call = {.g = g};
  memory_t shared = {};
  lay_out(&call, team->size, &shared);
  int64_t module = 0, first = 0, most = 0;
  while (module < g->num_modules) {
    memory_t some = shared;
    cut_pieces(&call, &module, &first, &some);
    most = MAX(most, some.used);
  }
  char *memory = scratch(team, (size_t)most);
  if (memory == NULL) return -1;
  shared = (memory_t){memory, 0};
  lay_out(&call, team->size, &shared);
  find_spans(&call);
  for (module = first = 0; module < g->num_modules;) {
    memory_t some = shared;
    cut_pieces(&call, &module, &first, &some);
    for (size_t i = 0; i < sizeof call.next / sizeof *call.next; i++) atomic_store(&call.next[i], 0);
    work(team, run, &call);
  }
  keep_scratch(team, KEPT_BYTES);
  return 0;
}
