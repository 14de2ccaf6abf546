/* Where a call of linear_gradient.c keeps what lies between its stages, and how it is cut into
   pieces. */

#include "linear_gradient.h"

static void *grab(memory_t *memory, int64_t bytes) {
  int64_t at = memory->used;
  memory->used += rounded_up(bytes, LINE_BYTES);
  return memory->start ? memory->start + at : NULL;
}

static int64_t packed_bytes(const call_t *c, int64_t out, int64_t k) {
  return panels_of(out) * panel_bytes(c->g->is_narrow, k);
}

static void lay_out_adapter(call_t *c, adapter_t *adapter, memory_t *memory) {
  int64_t in = c->g->in, width = adapter->width, count = adapter->segment->count;
  adapter->a_rows = grab(memory, width * row_bytes(c, in));
  adapter->a = grab(memory, packed_bytes(c, width, in));
  adapter->a_turned = grab(memory, packed_bytes(c, in, width));
  adapter->low = grab(memory, width * row_bytes(c, count));
  adapter->dlow = grab(memory, width * row_bytes(c, count));
  adapter->x = grab(memory, packed_bytes(c, in, count));
}

void lay_out(call_t *c, int threads, memory_t *memory) {
  const linear_gradient_t *g = c->g;
  int64_t largest_rank = 0;
  c->adapters = grab(memory, g->num_segments * (int64_t)sizeof *c->adapters);
  c->spans = grab(memory, (2 * g->num_segments + 1) * (int64_t)sizeof *c->spans);
  for (int64_t s = 0; s < g->num_segments; s++) {
    adapter_t adapter = {&g->segments[s], g->segments[s].rank * g->num_modules};
    lay_out_adapter(c, &adapter, memory);
    largest_rank = MAX(largest_rank, g->segments[s].rank);
    if (memory->start) c->adapters[s] = adapter;
  }
  c->width = largest_rank * g->num_modules;
  if (g->num_segments) {
    c->dlow = grab(memory, g->rows * c->width * (int64_t)sizeof(float));
    if (g->is_narrow) c->dlow_rows = grab(memory, g->rows * row_bytes(c, c->width));
    if (g->is_narrow || g->x_gates) c->x = grab(memory, g->rows * row_bytes(c, g->in));
  }
  c->own_floats = MAX(MAX(PIECE, g->in),
                      MAX(BLOCK_ROWS * c->width, largest_rank * TASK_PANELS * PANEL));
  c->own_floats = rounded_up(c->own_floats, LINE);
  c->own = grab(memory, threads * c->own_floats * (int64_t)sizeof(float));
}

static void lay_out_piece(call_t *c, int i, memory_t *memory) {
  const linear_gradient_t *g = c->g;
  piece_t *piece = &c->pieces[i];
  int64_t out = piece->out, numbers = number_bytes(g->is_narrow);
  piece->turned = g->dx ? grab(memory, packed_bytes(c, g->in, out)) : NULL;
  int copies = g->is_narrow || g->softmax || g->dy_gates;
  piece->rounded = copies ? grab(memory, g->rows * row_bytes(c, out)) : NULL;
  piece->dy_stride = copies ? row_size(g->is_narrow, out) : g->dy_row;
  piece->dy = piece->rounded;
  if (!copies)
    piece->dy = (const char *)g->dy + (g->modules[piece->module].column + piece->first) * numbers;
  for (int64_t s = 0; s < g->num_segments; s++) {
    const segment_gradient_t *segment = &g->segments[s];
    char *b_rows = grab(memory, out * row_bytes(c, segment->rank));
    char *b_turned = grab(memory, packed_bytes(c, segment->rank, out));
    char *dy = grab(memory, packed_bytes(c, out, segment->count));
    if (!memory->start) continue;
    c->adapters[s].b_rows[i] = b_rows;
    c->adapters[s].b_turned[i] = b_turned;
    c->adapters[s].dy[i] = dy;
  }
}

void cut_pieces(call_t *c, int64_t *module, int64_t *first, memory_t *memory) {
  const linear_gradient_t *g = c->g;
  int64_t total = 0;
  c->is_first = *module == 0 && *first == 0;
  for (c->num_pieces = 0; *module < g->num_modules && total < PIECE; c->num_pieces++) {
    const module_gradient_t *m = &g->modules[*module];
    int64_t left = m->out - *first, out = MIN(left, PIECE);
    if (c->num_pieces && total + left > PIECE) break;
    const char *weight = weight_at(m->weight, g->is_narrow, m->width, *first);
    c->pieces[c->num_pieces] =
        (piece_t){.module = *module, .first = *first, .out = out, .weight = weight};
    lay_out_piece(c, c->num_pieces, memory);
    total += out;
    *first = out < left ? *first + out : 0;
    *module += out == left;
  }
  c->is_last = *module == g->num_modules;
}

void find_spans(call_t *c) {
  const linear_gradient_t *g = c->g;
  int64_t at = 0;
  c->num_spans = 0;
  for (int64_t s = 0; s < g->num_segments; s++) {
    const segment_gradient_t *segment = &g->segments[s];
    c->spans[c->num_spans++] = (span_t){at, segment->first - at, NULL};
    c->spans[c->num_spans++] = (span_t){segment->first, segment->count, &c->adapters[s]};
    at = segment->first + segment->count;
  }
  c->spans[c->num_spans++] = (span_t){at, g->rows - at, NULL};
}
