/* Threads of a team: begun once, ended with it. */

#include "team.h"

typedef struct {
  team_t *team;
  int rank;
} member_t;

static void *live(void *argument) {
  member_t me = *(member_t *)argument;
  free(argument);
  for (;;) {
    meet(me.team);
    if (me.team->job == NULL) return NULL;
    me.team->job(me.team, me.rank, me.team->argument);
    meet(me.team);
  }
}

/* size: threads that work, the caller's included. NULL when they cannot be had. */
team_t *team_new(int size) {
  team_t *team = calloc(1, sizeof *team);
  if (team == NULL) return NULL;
  team->size = size;
  team->patience = MOST_SPINS;
  pthread_mutex_init(&team->mutex, NULL);
  pthread_cond_init(&team->woken, NULL);
  team->threads = calloc((size_t)size, sizeof *team->threads);
  for (int i = 1; i < size; i++) {
    member_t *member = malloc(sizeof *member);
    *member = (member_t){team, i};
    if (pthread_create(&team->threads[i], NULL, live, member) != 0) return NULL;
  }
  return team;
}

void team_end(team_t *team) {
  team->job = NULL;
  meet(team);
  for (int i = 1; i < team->size; i++) pthread_join(team->threads[i], NULL);
  pthread_mutex_destroy(&team->mutex);
  pthread_cond_destroy(&team->woken);
  free(team->threads);
  free(team->scratch);
  free(team);
}
