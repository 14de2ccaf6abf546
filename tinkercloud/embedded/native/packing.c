/* Weights into the packed form, out of it, and from the form of y = x W^T into that of dx = dy W. */

#include "packing.h"

/* Four bytes of a row-major matrix: a float, or a pair of narrow numbers, the second of which may be
   missing at a row's end. */
INLINE uint32_t read_word(const char *row, int64_t at, int64_t row_bytes) {
  uint32_t word = 0;
  memcpy(&word, row + at * 4, (size_t)MIN(4, row_bytes - at * 4));
  return word;
}

void pack_panel(const matrix_t *m, int64_t panel, const void *rows, void *packed) {
  int64_t row_bytes = m->k * number_bytes(m->is_narrow);
  int64_t words = (row_bytes + 3) / 4, first = panel * PANEL;
  int64_t count = MIN(PANEL, m->out - first);
  char *to = (char *)packed + panel * panel_bytes(m->is_narrow, m->k);
  memset(to, 0, (size_t)panel_bytes(m->is_narrow, m->k));
  const char *from = (const char *)rows + first * row_bytes;
  for (int64_t n = 0; n < count; n++, from += row_bytes)
    for (int64_t i = 0; i < words; i++) {
      uint32_t word = read_word(from, i, row_bytes);
      memcpy(to + i * STEP_BYTES + n * 4, &word, 4);
    }
}

void unpack_panel(const matrix_t *m, int64_t panel, const void *packed, void *rows) {
  int64_t row_bytes = m->k * number_bytes(m->is_narrow);
  int64_t words = (row_bytes + 3) / 4, first = panel * PANEL;
  const char *from = (const char *)packed + panel * panel_bytes(m->is_narrow, m->k);
  for (int64_t n = 0; n < MIN(PANEL, m->out - first); n++) {
    char *to = (char *)rows + (first + n) * row_bytes;
    for (int64_t i = 0; i < words; i++)
      memcpy(to + i * 4, from + i * STEP_BYTES + n * 4, (size_t)MIN(4, row_bytes - i * 4));
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

static void turn_wide(const char *from, int64_t count, char *to) {
  float in[PANEL][PANEL] = {}, out[PANEL][PANEL];
  memcpy(in, from, (size_t)count * sizeof in[0]);
  for (int i = 0; i < PANEL; i++)
    for (int j = 0; j < PANEL; j++) out[i][j] = in[j][i];
  memcpy(to, out, sizeof out);
}

void turn_panel(const matrix_t *m, int64_t panel, const void *packed, void *turned) {
  int64_t bytes = panel_bytes(m->is_narrow, m->k), end = panel_bytes(m->is_narrow, m->out);
  int64_t block = PANEL / (m->is_narrow ? 2 : 1) * STEP_BYTES; /* of 16 inputs */
  const char *from = (const char *)packed + panel * block;
  char *to = turned;
  for (int64_t n = 0; n < panels_of(m->out); n++, from += bytes, to += block) {
    if (m->is_narrow) {
      turn_narrow(from, to);
    } else {
      char whole[PANEL * STEP_BYTES];
      turn_wide(from, MIN(PANEL, m->k - panel * PANEL), whole);
      memcpy(to, whole, (size_t)MIN(PANEL, m->out - n * PANEL) * STEP_BYTES);
    }
  }
  int64_t filled = panels_of(m->out) * block;
  if (filled < end) memset((char *)turned + filled, 0, (size_t)(end - filled));
}
