/* A team of threads that meets at barriers. It has one job at a time: callers that may be several
   take turns before they call (train_bindings.py has a lock, the sampler one thread). */

#ifndef TINKERCLOUD_TEAM_H
#define TINKERCLOUD_TEAM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef struct team {
  int size;
  atomic_int waiting, turn, sleepers, patience;
  pthread_mutex_t mutex;
  pthread_cond_t woken;
  void (*job)(struct team *, int, void *);
  void *argument;
  pthread_t *threads;
  void *scratch; /* of the job underway; kept, because fresh memory is cleared page by page */
  size_t scratch_bytes;
} team_t;

static inline void *scratch(team_t *team, size_t bytes) {
  if (bytes > team->scratch_bytes) {
    free(team->scratch);
    team->scratch = aligned_alloc(64, (bytes + 63) / 64 * 64); /* whole cache lines */
    team->scratch_bytes = team->scratch == NULL ? 0 : bytes;
  }
  return team->scratch;
}

/* After a job that took more than others do. */
static inline void keep_scratch(team_t *team, size_t most) {
  if (team->scratch_bytes <= most) return;
  free(team->scratch);
  team->scratch = NULL;
  team->scratch_bytes = 0;
}

/* How often a thread looks before it sleeps and leaves the core. Most is a few dozen microseconds.
   Where others want the cores, too, a member may wait for its own for milliseconds; who spins before
   it sleeps then has used up its turn and is not woken at once. So after one such wait threads are
   quick to sleep, and get more patient with each wait that was short. */
#define MOST_SPINS 4000
#define LEAST_SPINS 300
#define GROWTH 64
#define LONG_WAIT_NS 1000000

static inline void pause_a_moment(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static inline int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static inline void set_patience(team_t *team, int spins) {
  int most = spins < MOST_SPINS ? spins : MOST_SPINS;
  atomic_store_explicit(&team->patience, most, memory_order_relaxed);
}

/* Every member gets here before any goes on, and sees what all have written before. learns: how
   long it took says how busy the machine is; not so between jobs.

   `turn` counts the meetings, so that a slow member cannot take the next one for this one. Who
   comes last sets it and then looks for sleepers; a sleeper is counted and then looks at it, with
   the mutex held. Both are sequentially consistent, so one of them sees the other: nobody sleeps
   through. */
static inline void meet_and(team_t *team, int learns) {
  if (team->size == 1) return;
  int turn = atomic_load(&team->turn);
  if (atomic_fetch_add(&team->waiting, 1) + 1 == team->size) {
    atomic_store(&team->waiting, 0);
    atomic_store(&team->turn, turn + 1);
    if (atomic_load(&team->sleepers)) {
      pthread_mutex_lock(&team->mutex);
      pthread_cond_broadcast(&team->woken);
      pthread_mutex_unlock(&team->mutex);
    }
    return;
  }
  int patience = atomic_load_explicit(&team->patience, memory_order_relaxed);
  for (int i = 0; i < patience; i++) {
    if (atomic_load_explicit(&team->turn, memory_order_acquire) != turn) {
      if (learns) set_patience(team, patience + patience / GROWTH);
      return;
    }
    pause_a_moment();
  }
  int64_t began = nanoseconds();
  pthread_mutex_lock(&team->mutex);
  atomic_fetch_add(&team->sleepers, 1);
  while (atomic_load(&team->turn) == turn) pthread_cond_wait(&team->woken, &team->mutex);
  atomic_fetch_sub(&team->sleepers, 1);
  pthread_mutex_unlock(&team->mutex);
  if (learns && nanoseconds() - began > LONG_WAIT_NS) set_patience(team, LEAST_SPINS);
}

static inline void meet(team_t *team) { meet_and(team, 0); }

/* The members read `job` and `argument` after the first meeting, and are done with both after the
   second. */
static inline void work(team_t *team, void (*job)(team_t *, int, void *), void *argument) {
  team->job = job;
  team->argument = argument;
  meet(team);
  job(team, 0, argument);
  meet(team);
}

typedef struct {
  int64_t first, end;
} range_t;

#endif
