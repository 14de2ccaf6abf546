/* The norms around attention and MLP, for forward.c. */

#include <string.h>

#include "pass.h"

/* weight: NULL for no norm. reader: of the layer's modules that read the norm, the first. */
static void norm_row(const walk_t *w, const float *weight, const linear_t *reader, int64_t m) {
  const pass_t *p = w->p;
  int64_t d = p->model->hidden;
  float *out = w->normed.wide + m * d;
  if (weight)
    rms_norm(p->x + m * d, weight, d, p->model->eps, out);
  else
    memcpy(out, p->x + m * d, (size_t)d * sizeof *out);
  if (p->model->is_narrow) round_inputs(reader, &w->normed.narrow, m, 0, d, out);
}

/* kept: or NULL; gets the norm's inputs. */
void norm_rows(walk_t *w, const float *weight, const linear_t *reader, float *kept) {
  const pass_t *p = w->p;
  int64_t d = p->model->hidden;
  if (p->num_normed > 1) {
    for (int64_t m = 0; m < p->batch->rows; m++) norm_row(w, weight, reader, m);
    return;
  }
  EACH_ROW(w, m, p->batch->rows) {
    if (kept) memcpy(kept + m * d, p->x + m * d, (size_t)d * sizeof(float));
    norm_row(w, weight, reader, m);
  }
  end_stage(w);
}

/* What a module has put out, in `normed`, to the residual, after its norm. kept: or NULL; gets the
   norm's inputs. */
void add_normed(walk_t *w, const float *weight, float *kept) {
  const pass_t *p = w->p;
  int64_t d = p->model->hidden;
  EACH_ROW(w, m, p->batch->rows) {
    float *out = p->normed + m * d, *x = p->x + m * d;
    if (kept) memcpy(kept + m * d, out, (size_t)d * sizeof(float));
    rms_norm(out, weight, d, p->model->eps, out);
    for (int64_t i = 0; i < d; i++) x[i] += out[i];
  }
  end_stage(w);
}
