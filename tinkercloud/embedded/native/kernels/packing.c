/* Weights into the packed form, out of it, and from the form of y = x W^T into that of dx = dy W. */

#include "packing.h"

/* Rows are read as words of four bytes: a float, or a pair of narrow numbers, the second of which may
   be missing at a row's end. 16 words of 16 rows go together: whole cache lines on both sides. */

void pack_panel(const matrix_t *m, int64_t panel, const void *rows, void *packed) {
  int64_t row_bytes = m->k * number_bytes(m->is_narrow), first = panel * PANEL;
  int64_t count = MIN(PANEL, m->out - first), end = panel_bytes(m->is_narrow, m->width);
  const char *from = (const char *)rows + first * row_bytes;
  char *to = (char *)packed + panel * end;
  for (int64_t at = 0; at * PANEL < end; at += STEP_BYTES) {
    block_t in = {}, out;
    int64_t bytes = MAX(MIN(STEP_BYTES, row_bytes - at), 0);
    for (int64_t n = 0; n < count; n++) memcpy(in[n], from + n * row_bytes + at, (size_t)bytes);
    turn_words(in, out);
    memcpy(to + at * PANEL, out, (size_t)MIN((int64_t)sizeof out, end - at * PANEL));
  }
}

void unpack_panel(const matrix_t *m, int64_t panel, const void *packed, void *rows) {
  int64_t row_bytes = m->k * number_bytes(m->is_narrow), first = panel * PANEL;
  int64_t count = MIN(PANEL, m->out - first), end = panel_bytes(m->is_narrow, m->width);
  const char *from = (const char *)packed + panel * end;
  char *to = (char *)rows + first * row_bytes;
  for (int64_t at = 0; at < row_bytes; at += STEP_BYTES) {
    block_t in = {}, out;
    memcpy(in, from + at * PANEL, (size_t)MIN((int64_t)sizeof in, end - at * PANEL));
    turn_words(in, out);
    int64_t bytes = MIN(STEP_BYTES, row_bytes - at);
    for (int64_t n = 0; n < count; n++) memcpy(to + n * row_bytes + at, out[n], (size_t)bytes);
  }
}

/* 16 inputs of 16 outputs, narrow. Eight bytes are two inputs of two outputs: [output][input] of
   them become [input][output], and the 8 x 8 of them change places. */
static void turn_narrow(const char *from, char *to) {
  uint64_t in[8][8], out[8][8];
  memcpy(in, from, sizeof in);
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++) {
      uint64_t v = in[j][i];
      out[i][j] = (v & 0xFFFF00000000FFFF) | (v & 0xFFFF0000) << 16 | (v >> 16 & 0xFFFF0000);
    }
  memcpy(to, out, sizeof out);
}

/* Some inputs of some outputs, 16 at most of each. */
static void turn_wide(const char *from, int64_t inputs, int64_t outputs, char *to) {
  if (inputs == PANEL && outputs == PANEL) {
    turn_words((const word_t(*)[PANEL])from, (word_t(*)[PANEL])to);
    return;
  }
  block_t in = {}, out;
  memcpy(in, from, (size_t)inputs * sizeof in[0]);
  turn_words(in, out);
  memcpy(to, out, (size_t)outputs * sizeof out[0]);
}

#define TURNED_AHEAD 4 /* panels */

void turn_panel(const matrix_t *m, int64_t panel, const void *packed, void *turned) {
  int64_t bytes = panel_bytes(m->is_narrow, m->width), end = panel_bytes(m->is_narrow, m->out);
  int64_t block = PANEL / (m->is_narrow ? 2 : 1) * STEP_BYTES; /* of 16 inputs */
  const char *from = (const char *)packed + panel * block;
  char *to = turned;
  for (int64_t n = 0; n < panels_of(m->out); n++, from += bytes, to += block) {
    /* From panel to panel it is so far that the processor does not fetch by itself. */
    const char *later = from + TURNED_AHEAD * bytes;
    for (int64_t at = 0; at < block; at += LINE_BYTES) __builtin_prefetch(later + at);
    if (m->is_narrow)
      turn_narrow(from, to);
    else
      turn_wide(from, MIN(PANEL, m->k - panel * PANEL), MIN(PANEL, m->out - n * PANEL), to);
  }
  int64_t filled = panels_of(m->out) * block;
  if (filled < end) memset((char *)turned + filled, 0, (size_t)(end - filled));
}

/* ---- rows of activations as inputs of a product */

void round_row(int64_t is_narrow, const float *from, int64_t count, void *to) {
  write_numbers(is_narrow, to, 0, from, count);
  if (is_narrow)
    memset((narrow *)to + count, 0, (size_t)(row_size(1, count) - count) * sizeof(narrow));
}

INLINE void pack_pair(const narrow *even, const narrow *odd, char *to) {
  uint32_t pairs[PANEL];
  for (int i = 0; i < PANEL; i++) pairs[i] = even[i] | (uint32_t)odd[i] << 16;
  memcpy(to, pairs, sizeof pairs);
}

INLINE void pack_floats(const float *from, int64_t count, char *to) {
  if (count >= PANEL) {
    memcpy(to, from, STEP_BYTES);
  } else {
    memset(to, 0, STEP_BYTES);
    memcpy(to, from, (size_t)count * sizeof *from);
  }
}

void pack_inputs(int64_t is_narrow, const rows_t *rows, char *packed, int64_t bytes) {
  int64_t together = is_narrow ? 2 : 1, end = row_size(is_narrow, rows->count);
  static const narrow nothing[PANEL];
  for (int64_t n = 0; n < rows->columns; n += PANEL, packed += bytes) {
    const char *row = rows->at;
    char *to = packed;
    for (int64_t i = 0; i < end; i += together, row += together * rows->stride, to += STEP_BYTES) {
      __builtin_prefetch(to + bytes, 1); /* the next panel's, which are far from these */
      if (is_narrow)
        pack_pair(i < rows->count ? (const narrow *)row + n : nothing,
                  i + 1 < rows->count ? (const narrow *)(row + rows->stride) + n : nothing, to);
      else
        pack_floats((const float *)row + n, rows->columns - n, to);
    }
  }
}
