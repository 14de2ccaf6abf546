/* A team of threads that meets at barriers. */

#ifndef TINKERCLOUD_TEAM_H
#define TINKERCLOUD_TEAM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct team {
  int size;
  atomic_int waiting, turn, sleepers;
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
    team->scratch = malloc(bytes);
    team->scratch_bytes = team->scratch == NULL ? 0 : bytes;
  }
  return team->scratch;
}

#define SPINS 4000 /* a few dozen microseconds; then a thread sleeps and leaves the core */

static inline void pause_a_moment(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static inline void meet(team_t *team) {
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
  for (int i = 0; i < SPINS; i++) {
    if (atomic_load_explicit(&team->turn, memory_order_acquire) != turn) return;
    pause_a_moment();
  }
  pthread_mutex_lock(&team->mutex);
  atomic_fetch_add(&team->sleepers, 1);
  while (atomic_load(&team->turn) == turn) pthread_cond_wait(&team->woken, &team->mutex);
  atomic_fetch_sub(&team->sleepers, 1);
  pthread_mutex_unlock(&team->mutex);
}

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
