/* The kernel with `async_scheduling`, policy `mixed`: who owns which block, which token and which
 * end while a step is decided before the tokens of the one before are known.
 *
 * Users add and abort, the engine schedules, commits and discards, the device runs the plans of one
 * in-order stream: in any order. Every call is one atomic step, and check() says what holds after it.
 * A discarded plan writes nothing from then on. Rules P-A3 .. P-A8, P-P2 .. P-P7: docs/policies.md.
 *
 * The requests of a class have equal tokens at equal positions, so a prefix is known by its class
 * and its length, and the key of a block by its class and its place. Requests are admitted in
 * order of arrival and the newest is the victim, so `waiting` and `running` are both in order of
 * arrival, and their order is that of the numbers.
 */
#ifndef N
#define N 2                     /* requests, at most 3 */
#endif
#ifndef M
#define M 3                     /* blocks */
#endif
#ifndef MOST_PROMPT
#define MOST_PROMPT 4
#endif
#ifndef MOST_OUTPUT
#define MOST_OUTPUT 3
#endif
#ifndef SEATS
#define SEATS 2
#endif
#ifndef BUDGET
#define BUDGET 3
#endif
#ifndef DEFECT
#define DEFECT 0
#endif
#define B 2                     /* tokens of a block */
#define NONE 255

/* Planted defects, each of which the checker must find. */
#define VOID_PLANS_LATE    (DEFECT == 1)  /* a plan of void entries may run after the next one */
#define SECOND_KEEPS_KEYS  (DEFECT == 2)  /* discard: the second plan's keys stay */
#define SECOND_SPARES      (DEFECT == 3)  /* discard: the second plan's requests live on */
#define OVERRUNS_ENDS      (DEFECT == 4)  /* not P-P2: a request is served past its known end */
#define KEYS_TOO_EARLY     (DEFECT == 5)  /* not P-P5: keys for blocks with a pending token */
#define FORGETS_TOKENS     (DEFECT == 6)  /* not P-P7: the token of a preempted request is lost */

mtype = { NEW, WAITING, RUNNING, ENDED };

typedef Request { mtype state; byte class, limit, known, pending, sampled, computed, cached, size;
                  bool aborting; byte table[M] };
typedef Entry   { byte class, first, count; bool samples; byte table[M] };
typedef Plan    { Entry entry[N]; bool ran; bool keyed[M] };

Request req[N];
Plan plan[2];  byte num_open;         /* plan[0] is the older one */
byte queue[M], num_free;              /* free blocks, the next one to be handed out first */
byte key[M];                          /* 0 = none */
byte aged[M],  num_keyed;             /* blocks with a key, the oldest key first */
byte slot[M * B];                     /* what each slot holds: 0 = nothing, else CONTENT */
byte num_added, num_live;

#define KEY(class, place)     (1 + (class) * M + (place))
#define CONTENT(class, where) (1 + (class) * M * B + (where))
#define TOTAL(r)              (req[r].known + req[r].pending)
#define LIVE(r)               (req[r].state == WAITING || req[r].state == RUNNING)
#define BLOCKS(tokens)        (((tokens) + B - 1) / B)
#define MIN(a, b)             ((a) < (b) -> (a) : (b))

/* Scratch of one atomic step; not part of the state. */
hidden byte a, b, c, i, j, k, v, n, hits, free_hits, budget, seated, held, place, newest;
hidden byte stuck, preempted, found, scheduling;

#include "async_kernel_show.pml"

/* Blocks ------------------------------------------------------------------------------------- */

inline dequeue(x) {                  /* from wherever it stands, if it does */
  place = 0;
  for (a : 0 .. num_free - 1) {
    if :: queue[a] != x -> queue[place] = queue[a]; place++ :: else fi
  }
  if :: place < num_free -> num_free--; queue[num_free] = 0 :: else fi
}

inline push_back(x)  { queue[num_free] = x; num_free++ }

inline push_front(x) {
  for (a : 0 .. num_free - 1) { queue[num_free - a] = queue[num_free - a - 1] }
  queue[0] = x; num_free++
}

inline forget_key(x) {
  if
  :: key[x] != 0 ->
       key[x] = 0; place = 0;
       for (a : 0 .. num_keyed - 1) {
         if :: aged[a] != x -> aged[place] = aged[a]; place++ :: else fi
       }
       num_keyed--; aged[num_keyed] = 0
  :: else
  fi
}

inline count_holders(x) {            /* -> held */
  held = 0;
  for (a : 0 .. N - 1) {
    for (c : 0 .. req[a].size - 1) { if :: req[a].table[c] == x -> held++ :: else fi }
  }
}

inline extend(r, tokens) {           /* blocks for so many tokens; an old key ends here */
  for (i : req[r].size .. -1 + BLOCKS(tokens)) {
    b = queue[0]; dequeue(b); forget_key(b);
    req[r].table[i] = b; req[r].size = i + 1
  }
}

inline release(r) {                  /* P-A7 */
  n = req[r].size; req[r].size = 0;
  for (i : 0 .. n - 1) {
    count_holders(req[r].table[i]);
    if :: held == 0 && key[req[r].table[i]] == 0 -> push_front(req[r].table[i]) :: else fi
  }
  for (i : 0 .. n - 1) {
    b = req[r].table[n - 1 - i];
    count_holders(b);
    if :: held == 0 && key[b] != 0 -> push_back(b) :: else fi
  }
  for (i : 0 .. M - 1) { req[r].table[i] = 0 }
  req[r].computed = 0; req[r].cached = 0; req[r].pending = 0
}

inline give_keys(r, tokens) {        /* to the blocks that are full with so many tokens */
  for (i : req[r].cached .. -1 + (tokens) / B) {
    b = req[r].table[i];
    assert(key[b] == 0 && (tokens) <= req[r].known);  /* a key is made of known tokens */
    key[b] = KEY(req[r].class, i); aged[num_keyed] = b; num_keyed++;
    if :: scheduling -> plan[num_open].keyed[b] = true :: else fi;
    req[r].cached = i + 1
  }
}

inline look_up(r) {                  /* P-A6: -> hits, free_hits; found blocks are the table's */
  hits = 0; free_hits = 0; found = true;
  for (i : 0 .. -1 + (req[r].known - 1) / B) {
    b = NONE;
    for (a : 0 .. num_keyed - 1) {
      if :: found && b == NONE && key[aged[a]] == KEY(req[r].class, i) -> b = aged[a] :: else fi
    }
    if :: b == NONE -> found = false
       :: else -> req[r].table[i] = b; hits++; count_holders(b);
                  if :: held == 0 -> free_hits++ :: else fi
    fi
  }
}

/* Requests ----------------------------------------------------------------------------------- */

inline retire(r) {                      /* P-P4: its blocks are free at once */
  assert(LIVE(r));                   /* nobody ends twice */
  release(r);
  req[r].state = ENDED; num_live--; req[r].aborting = false;
  req[r].class = 0; req[r].known = 0; req[r].sampled = 0;
  req[r].limit = 0
}

/* schedule() --------------------------------------------------------------------------------- */

inline put_entry(r, tokens) {
  plan[num_open].entry[r].first = req[r].computed;
  plan[num_open].entry[r].count = tokens;
  plan[num_open].entry[r].samples = (req[r].computed + tokens == TOTAL(r));
  plan[num_open].entry[r].class = req[r].class;
  for (i : 0 .. req[r].size - 1) { plan[num_open].entry[r].table[i] = req[r].table[i] }
}

inline book(r) {                     /* P-P1: an entry that samples adds a pending token */
  req[r].computed = req[r].computed + plan[num_open].entry[r].count;
  if
  :: plan[num_open].entry[r].samples ->
       assert(req[r].computed == req[r].sampled);    /* every position is sampled once */
       req[r].pending++; req[r].sampled++
  :: else
  fi
}

inline make_room(r, tokens) {        /* P-A3, P-P6; -> stuck: the asker itself gave way */
  do
  :: !stuck && BLOCKS(tokens) > req[r].size + num_free ->
       newest = r;
       for (v : r .. N - 1) { if :: req[v].state == RUNNING -> newest = v :: else fi }
       events_of_a_victim(newest);
       release(newest); req[newest].state = WAITING; preempted = true;
       stuck = (newest == r)
  :: else -> break
  od
}

inline serve() {
  for (j : 0 .. N - 1) {
    if
    :: !stuck && req[j].state == RUNNING &&
       (TOTAL(j) < req[j].limit || OVERRUNS_ENDS) ->                                       /* P-P2 */
         k = MIN(TOTAL(j) - req[j].computed, budget);
         if
         :: k > 0 ->
              make_room(j, req[j].computed + k);
              if
              :: !stuck ->
                   extend(j, req[j].computed + k);
                   budget = budget - k;
                   put_entry(j, k);
                   n = req[j].computed + k;
                   if :: n > req[j].known && !KEYS_TOO_EARLY -> n = req[j].known   /* P-P5 */
                      :: else
                   fi;
                   give_keys(j, n);
                   book(j)
              :: else
              fi
         :: else
         fi
    :: else
    fi
  }
}

inline admit() {                     /* P-A4: the head of waiting, whole sequence tested */
  seated = 0;
  for (j : 0 .. N - 1) { if :: req[j].state == RUNNING -> seated++ :: else fi }
  stuck = preempted;
  for (j : 0 .. N - 1) {
    if
    :: !stuck && req[j].state == WAITING ->
         look_up(j);
         stuck = (seated >= SEATS || budget == 0 ||
                  BLOCKS(req[j].known) - hits + free_hits > num_free);
         if
         :: stuck -> for (i : 0 .. M - 1) { req[j].table[i] = 0 }
         :: else ->
              events_of_hits();
              for (i : 0 .. hits - 1) { dequeue(req[j].table[i]) }
              for (i : hits .. M - 1) { req[j].table[i] = 0 }
              req[j].size = hits; req[j].cached = hits; req[j].computed = hits * B;
              k = MIN(req[j].known - req[j].computed, budget);
              extend(j, req[j].computed + k);
              req[j].state = RUNNING; seated++; budget = budget - k;
              put_entry(j, k);
              give_keys(j, req[j].computed + k);
              book(j)
         fi
    :: else
    fi
  }
}

/* The device --------------------------------------------------------------------------------- */

#define SLOT(p, r, where) slot[plan[p].entry[r].table[(where) / B] * B + (where) % B]

inline execute(p) {                  /* all entries write, then all read what is before them */
  for (j : 0 .. N - 1) {
    events_of_a_void_write(p, j);
    for (k : plan[p].entry[j].first .. plan[p].entry[j].first + plan[p].entry[j].count - 1) {
      SLOT(p, j, k) = CONTENT(plan[p].entry[j].class, k)
    }
  }
  for (j : 0 .. N - 1) {
    if
    :: LIVE(j) && plan[p].entry[j].count > 0 ->
         for (k : 0 .. plan[p].entry[j].first + plan[p].entry[j].count - 1) {
           assert(SLOT(p, j, k) == CONTENT(req[j].class, k))   /* it reads its own prefix */
         }
    :: else
    fi
  }
  plan[p].ran = true
}

/* Calls of the kernel ------------------------------------------------------------------------ */

inline add(length, outputs, kind) {
  req[num_added].state = WAITING; req[num_added].class = kind;
  req[num_added].known = length; req[num_added].sampled = length;
  req[num_added].limit = length + outputs;
  num_added++; num_live++
}

inline schedule() {
  scheduling = true; stuck = false; preempted = false; budget = BUDGET;
  serve(); admit();
  num_open++; scheduling = false
}

inline clear(p) {
  for (j : 0 .. N - 1) {
    plan[p].entry[j].class = 0; plan[p].entry[j].first = 0; plan[p].entry[j].count = 0;
    plan[p].entry[j].samples = false;
    for (i : 0 .. M - 1) { plan[p].entry[j].table[i] = 0 }
  }
  for (i : 0 .. M - 1) { plan[p].keyed[i] = false }
  plan[p].ran = false
}

inline commit(stops) {               /* of plan 0: keys, tokens, ends */
  for (j : 0 .. N - 1) {             /* P-P5: what its schedule() could not give yet */
    if :: req[j].state == RUNNING && plan[0].entry[j].count > 0 ->
            events_of_late_keys(j);
            give_keys(j, plan[0].entry[j].first + plan[0].entry[j].count)
       :: else
    fi
  }
  for (j : 0 .. N - 1) {
    if
    :: LIVE(j) && plan[0].entry[j].samples && !req[j].aborting &&
       !(FORGETS_TOKENS && req[j].state == WAITING) ->
         assert(req[j].known == plan[0].entry[j].first + plan[0].entry[j].count);
         req[j].known++;             /* none lost, none twice */
         if :: req[j].state == RUNNING -> req[j].pending-- :: else -> event(STALE_TOKEN) fi
    :: plan[0].entry[j].count > 0 && !LIVE(j) -> event(VOID_ENTRY)      /* P-P3 */
    :: else
    fi
  }
  for (j : 0 .. N - 1) {
    if
    :: req[j].aborting -> show_end(j, ABORTED); retire(j)
    :: LIVE(j) && !req[j].aborting && ((stops >> j) & 1) -> show_end(j, STOP); retire(j)
    :: LIVE(j) && !req[j].aborting && !((stops >> j) & 1) && req[j].known == req[j].limit &&
       plan[0].entry[j].samples -> show_end(j, LENGTH); retire(j)
    :: else
    fi
  }
  shift_plans()
}

inline shift_plans() {
  for (j : 0 .. N - 1) {
    plan[0].entry[j].class = plan[1].entry[j].class;
    plan[0].entry[j].first = plan[1].entry[j].first;
    plan[0].entry[j].count = plan[1].entry[j].count;
    plan[0].entry[j].samples = plan[1].entry[j].samples;
    for (i : 0 .. M - 1) { plan[0].entry[j].table[i] = plan[1].entry[j].table[i] }
  }
  for (i : 0 .. M - 1) { plan[0].keyed[i] = plan[1].keyed[i] }
  plan[0].ran = plan[1].ran;
  clear(1); num_open--
}

inline discard() {                   /* the older plan failed; the newer one goes with it */
  for (k : 0 .. num_open - 1) {
    for (b : 0 .. M - 1) {
      if :: plan[k].keyed[b] && key[b] != 0 && !(SECOND_KEEPS_KEYS && k == 1) ->
              events_of_a_lost_key(k);
              forget_key(b)
         :: else
      fi
    }
  }
  for (k : 0 .. N - 1) {
    if
    :: req[k].aborting -> show_end(k, ABORTED); retire(k)
    :: LIVE(k) && !req[k].aborting && (plan[0].entry[k].count > 0 ||
       (plan[1].entry[k].count > 0 && !SECOND_SPARES)) ->
         events_of_a_failure(k); show_end(k, ERROR); retire(k)
    :: else
    fi
  }
  clear(0); clear(1); num_open = 0
}

inline abort(r) {                    /* at once, or with the next commit or discard */
  if :: num_open > 0 -> req[r].aborting = true :: else -> show_end(r, ABORTED); retire(r) fi
}

/* What holds after every call ---------------------------------------------------------------- */

inline check() {
  for (b : 0 .. M - 1) {
    count_holders(b);
    n = 0;
    for (a : 0 .. num_free - 1) { if :: queue[a] == b -> n++ :: else fi }
    assert(n + (held > 0) == 1);                    /* free or held, and free once */
    assert(held < 2 || key[b] != 0);                /* shared only by a hit ... */
    n = 0;
    for (a : 0 .. num_keyed - 1) { if :: aged[a] == b -> n++ :: else fi }
    assert(n == (key[b] != 0));
    if
    :: key[b] != 0 && (num_open == 0 || plan[0].ran) && (num_open < 2 || plan[1].ran) ->
         for (i : 0 .. B - 1) { assert(slot[b * B + i] == 1 + (key[b] - 1) * B + i) }
    :: else                                         /* a key tells what the block holds */
    fi
  }
  for (j : 0 .. N - 1) {
    for (i : 0 .. req[j].size - 1) {                /* ... of the same prefix */
      b = req[j].table[i];
      assert(key[b] == 0 || key[b] == KEY(req[j].class, i))
    }
    assert(req[j].state == RUNNING || req[j].size + req[j].pending + req[j].computed == 0);
    assert(req[j].state != RUNNING || req[j].size == BLOCKS(req[j].computed));
    assert(req[j].pending <= 2 && TOTAL(j) <= req[j].limit)
  }
  forget_unreadable()
}

inline forget_unreadable() {         /* so that states that differ in nothing else are one */
  if
  :: (num_open == 0 || plan[0].ran) && (num_open < 2 || plan[1].ran) ->
       for (b : 0 .. M - 1) {
         count_holders(b);
         if :: held == 0 && key[b] == 0 -> for (i : 0 .. B - 1) { slot[b * B + i] = 0 } :: else fi
       }
  :: else
  fi
}

#define FINISHED (num_added == N && num_live == 0 && num_open == 0)
ltl everybody_ends { <> FINISHED }

/* Who calls ---------------------------------------------------------------------------------- */

proctype user(byte id) {             /* adds its request, and may abort it */
  byte x, y, z;

  atomic {
    num_added == id -> choose
    select (x : 1 .. MOST_PROMPT); select (y : 1 .. MOST_OUTPUT);
    if :: z = 0 :: id > 0 -> z = 1 fi;
    d_step { begin(ADD, x, y, z); add(x, y, z); check(); finish(); x = 0; y = 0; z = 0 }
  }
end:
  do
  :: d_step { LIVE(id) && !req[id].aborting ->
       begin(ABORT, id, 0, 0); abort(id); check(); finish() }
  od
}

#define VOID(p, r) (plan[p].entry[r].count == 0 || !LIVE(r))
#if N == 2
#define ALL_VOID (VOID(0, 0) && VOID(0, 1))
#else
#define ALL_VOID (VOID(0, 0) && VOID(0, 1) && VOID(0, 2))
#endif

proctype device() {                  /* one stream, in order */
end:
  do
  :: d_step { num_open > 0 && !plan[0].ran ->
       begin(RUN, 0, 0, 0); execute(0); check(); finish() }
  :: d_step { num_open > 1 && !plan[1].ran && (plan[0].ran || (VOID_PLANS_LATE && ALL_VOID)) ->
       begin(RUN, 1, 0, 0); execute(1); check(); finish() }
  od
}

#define MAY_STOP(r) (LIVE(r) && plan[0].entry[r].samples && !req[r].aborting)

proctype engine() {
  byte r, stops;

end:
  do
  :: d_step { num_live > 0 && num_open < 2 ->
       begin(SCHEDULE, 0, 0, 0); schedule(); check(); finish() }
  :: atomic { num_open > 0 && plan[0].ran -> choose
       for (r : 0 .. N - 1) { if :: MAY_STOP(r) -> stops = stops | (1 << r) :: true fi };
       d_step { begin(COMMIT, stops, 0, 0); commit(stops); check(); finish(); stops = 0; r = 0 } }
  :: d_step { num_open > 0 ->
       begin(DISCARD, num_open, 0, 0); discard(); check(); finish() }
  od
}

init {
  atomic {
    for (j : 0 .. M - 1) { queue[j] = j }; num_free = M;
    run device(); run engine();
    for (j : 0 .. N - 1) { run user(j) }
  }
}
