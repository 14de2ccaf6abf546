/* Which form sums of pairs have (pairs.h). It is measured, once for a process: no bit depends on it. */

#include "pairs.h"

#include <stdatomic.h>

#include "team.h"

enum { UNKNOWN, BY_PAIRS, WIDENED };

#if HAS_PAIRS

#define CHAINS 16
#define STEPS 64
#define TRIALS 16 /* another thread may take the core during some */

static atomic_int form;

#define EACH_CHAIN _Pragma("GCC unroll 16") for (int i = 0; i < CHAINS; i++)

#define DEFINE_TRIAL(NAME, ADD)                                                                    \
  static int64_t NAME(void) {                                                                      \
    vec sums[CHAINS] = {}, one = {};                                                               \
    int64_t began = nanoseconds();                                                                 \
    for (int step = 0; step < STEPS; step++) EACH_CHAIN { ADD; }                                   \
    EACH_CHAIN __asm__ volatile("" : : "v"(sums[i])); /* they are wanted */                        \
    return nanoseconds() - began;                                                                  \
  }

DEFINE_TRIAL(time_of_pairs, ADD_PAIRS(sums[i], one, one))
DEFINE_TRIAL(time_widened, ADD_PRODUCT(sums[i], one, one); ADD_PRODUCT(sums[i], one, one))

static int measured(void) {
  int64_t pairs = INT64_MAX, widened = INT64_MAX;
  for (int i = 0; i < TRIALS; i++) {
    pairs = MIN(pairs, time_of_pairs());
    widened = MIN(widened, time_widened());
  }
  return 4 * widened < 3 * pairs ? WIDENED : BY_PAIRS; /* to widen takes time, too */
}

int widens_pairs(void) {
  int known = atomic_load_explicit(&form, memory_order_relaxed);
  if (known == UNKNOWN) {
    known = measured();
    atomic_store_explicit(&form, known, memory_order_relaxed);
  }
  return known == WIDENED;
}

#endif

/* For tests and measurements, between passes. widens: 1, 0, or -1 for what is faster. Whether there
   is a choice. */
int choose_form_of_pairs(int widens) {
#if HAS_PAIRS
  atomic_store(&form, widens < 0 ? UNKNOWN : widens ? WIDENED : BY_PAIRS);
#endif
  (void)widens;
  return HAS_PAIRS;
}
