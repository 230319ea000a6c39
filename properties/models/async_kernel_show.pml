/* Prints every call in words: `call`, what it `met`, who `ended`, and the state after it. The checker
 * leaves all of this out unless it is compiled with -DPRINTF.
 */
#ifdef GRAPH
/* The depth at which the call's choices began: the state there is the one that it starts from. */
short began;
#define choose                  c_code { now.began = depth - 1; };
#define show_depth              c_code { printf("depth %ld\n", now.began ? now.began : depth); \
                                         now.began = 0; };
#else
#define choose
#define show_depth
#endif
#ifndef TRAP
#define TRAP NOTHING  /* with -DTRAP=HIT the shortest counterexample ends with a hit */
#endif
#define begin(name, x0, x1, x2) show_depth printf("call "); printf(#name); \
                                printf(" %d %d %d\n", x0, x1, x2)
#define event(name)             printf("met "); printf(#name); printf("\n"); \
                                trapped = trapped || (name == TRAP)
#define show_end(r, reason)     printf("ended %d ", r); printf(#reason); \
                                printf(" %d\n", req[r].known)

mtype = { NOTHING, PREEMPTED, PREEMPTED_IN_FLIGHT, PREEMPTED_AT_ITS_LIMIT, HIT, HIT_ON_FREE_BLOCK,
          LATE_KEY, STALE_TOKEN, VOID_ENTRY, VOID_WRITE_TO_A_NEW_OWNER,
          SECOND_PLAN_LOST_A_KEY, FAILED_IN_SECOND_PLAN_ONLY }

hidden byte trapped;

inline finish() {
  printf("open %d\nfree", num_open);
  for (a : 0 .. num_free - 1) { printf(" %d", queue[a]) }
  printf("\nkeys");
  for (a : 0 .. M - 1) { printf(" %d", key[a]) }
  for (i : 0 .. N - 1) {
    printf("\nrequest ");
    if
    :: req[i].state == WAITING -> printf("WAITING")
    :: req[i].state == RUNNING -> printf("RUNNING")
    :: else -> printf("GONE")
    fi;
    printf(" %d %d %d %d", req[i].known, req[i].pending, req[i].computed, req[i].cached);
    for (a : 0 .. req[i].size - 1) { printf(" %d", req[i].table[a]) }
  }
  printf("\ndone\n");
  assert(!trapped)
}

inline events_of_a_victim(r) {
  event(PREEMPTED);
  if :: req[r].pending > 0 -> event(PREEMPTED_IN_FLIGHT) :: else fi;
  if :: TOTAL(r) == req[r].limit -> event(PREEMPTED_AT_ITS_LIMIT) :: else fi
}

inline events_of_late_keys(r) {
  if :: req[r].cached < (plan[0].entry[r].first + plan[0].entry[r].count) / B -> event(LATE_KEY)
     :: else
  fi
}

inline events_of_hits() {
  if :: hits > 0 -> event(HIT) :: else fi;
  if :: free_hits > 0 -> event(HIT_ON_FREE_BLOCK) :: else fi
}

inline events_of_a_void_write(p, r) {  /* its block has been given to somebody else meanwhile */
  if
  :: plan[p].entry[r].count > 0 && !LIVE(r) ->
       k = plan[p].entry[r].table[(plan[p].entry[r].first + plan[p].entry[r].count - 1) / B];
       count_holders(k);
       if :: held > 0 -> event(VOID_WRITE_TO_A_NEW_OWNER) :: else fi
  :: else
  fi
}

inline events_of_a_lost_key(p) {
  if :: p == 1 -> event(SECOND_PLAN_LOST_A_KEY) :: else fi
}

inline events_of_a_failure(r) {
  if :: plan[0].entry[r].count == 0 -> event(FAILED_IN_SECOND_PLAN_ONLY) :: else fi
}
