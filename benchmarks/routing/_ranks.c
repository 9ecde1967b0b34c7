/*
 * The ranks of a simulated server: continuous batching with chunked prefill and paged KV memory.
 *
 * `model.py` says the same in plain Python and a test holds the two together, to the last bit: all sums that enter an
 * iteration's time are integers, and the floating-point operations stand in the same order on both sides.
 *
 * Ranks know nothing of each other. A rank acts only at the boundaries between its iterations:
 *     1. the finished iteration's tokens are produced (first tokens, finishes, freed pages) and its piggyback leaves,
 *     2. requests that have arrived are taken into the queue,
 *     3. the next iteration is scheduled, which may admit and preempt,
 *     4. the load is published (with publish_early between 1 and 2 instead, and only if an iteration has ended).
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define RING 8 /* piggybacks kept for each rank and frontend; the newest of them may still be on the wire */

typedef struct {
    double base_s, prefill_s, attention_s, decode_s, context_s;
    int64_t chunk_tokens, max_running, kv_pages, page_tokens, publish_early;
} params;

typedef struct {
    double reach; /* when the request is at the rank */
    int64_t prompt, output;
    int64_t generated, computed, pages, step; /* step: tokens of the iteration under way */
    int32_t frontend;
} request;

typedef struct {
    int32_t *items;
    int64_t head, count, room;
} deque;

typedef struct {
    double at;
    int64_t running, waiting, pages;
} load;

typedef struct {
    int32_t *running;
    int64_t count; /* of running */
    deque waiting, inbox;
    int64_t free_pages, iterations, preemptions, since_rare;
    double end; /* of the iteration under way, or of the last one */
    int busy;
} rank;

typedef struct {
    double at;
    int64_t request;
    int64_t kind; /* 0 first token, 1 finished */
} event;

typedef struct cluster {
    params p;
    int64_t ranks, frontends, rare_every;
    rank *rank;
    request *request;
    load *mailbox, *rare; /* one a rank */
    load *ring;           /* ranks x frontends x RING */
    int64_t *ring_count;  /* ranks x frontends */
    unsigned char *spoken; /* scratch: frontends with a token in this iteration */
    event *events;
    int64_t event_count, event_room;
    int failed;
} cluster;

/* ---- queues ---------------------------------------------------------------------------------------------------- */

static int grow(deque *q) {
    if (q->count < q->room) return 1;
    int64_t room = q->room ? 2 * q->room : 16;
    int32_t *items = malloc((size_t)room * sizeof *items);
    if (!items) return 0;
    for (int64_t i = 0; i < q->count; i++) items[i] = q->items[(q->head + i) % q->room];
    free(q->items);
    q->items = items;
    q->head = 0;
    q->room = room;
    return 1;
}

static int push_back(deque *q, int32_t item) {
    if (!grow(q)) return 0;
    q->items[(q->head + q->count++) % q->room] = item;
    return 1;
}

static int push_front(deque *q, int32_t item) {
    if (!grow(q)) return 0;
    q->head = (q->head + q->room - 1) % q->room;
    q->items[q->head] = item;
    q->count++;
    return 1;
}

static int32_t front(const deque *q) { return q->items[q->head]; }

static void pop_front(deque *q) {
    q->head = (q->head + 1) % q->room;
    q->count--;
}

/* ---- one boundary ---------------------------------------------------------------------------------------------- */

static void emit(cluster *c, double at, int64_t id, int64_t kind) {
    if (c->event_count == c->event_room) {
        int64_t room = c->event_room ? 2 * c->event_room : 1024;
        event *events = realloc(c->events, (size_t)room * sizeof *events);
        if (!events) {
            c->failed = 1;
            return;
        }
        c->events = events;
        c->event_room = room;
    }
    c->events[c->event_count++] = (event){at, id, kind};
}

static load now_of(const cluster *c, const rank *k, double at) {
    return (load){at, k->count, k->waiting.count, c->p.kv_pages - k->free_pages};
}

static void ride(cluster *c, int64_t r, int64_t f, load l) {
    int64_t cell = r * c->frontends + f;
    c->ring[cell * RING + c->ring_count[cell]++ % RING] = l;
}

/* Step 1: the tokens of the iteration that ends at `at`. */
static void produce(cluster *c, int64_t r, double at) {
    rank *k = &c->rank[r];
    int64_t kept = 0;
    memset(c->spoken, 0, (size_t)c->frontends);
    for (int64_t i = 0; i < k->count; i++) {
        request *q = &c->request[k->running[i]];
        int done = 0;
        if (q->step) {
            q->computed += q->step;
            q->step = 0;
            if (q->computed == q->prompt + q->generated) {
                q->generated++;
                c->spoken[q->frontend] = 1;
                if (q->generated == 1) emit(c, at, k->running[i], 0);
                if (q->generated == q->output) {
                    emit(c, at, k->running[i], 1);
                    k->free_pages += q->pages;
                    q->pages = 0;
                    done = 1;
                }
            }
        }
        if (!done) k->running[kept++] = k->running[i];
    }
    k->count = kept;
    load l = now_of(c, k, at);
    for (int64_t f = 0; f < c->frontends; f++)
        if (c->spoken[f]) ride(c, r, f, l);
}

/* The first `tokens` of a request's context need pages; 0 if there are too few. */
static int reserve(cluster *c, rank *k, request *q, int64_t tokens) {
    int64_t need = (tokens + c->p.page_tokens - 1) / c->p.page_tokens - q->pages;
    if (need <= 0) return 1;
    if (need > k->free_pages) return 0;
    k->free_pages -= need;
    q->pages += need;
    return 1;
}

/* The youngest running request goes back to the head of the queue and will be computed anew. */
static int preempt(cluster *c, rank *k) {
    int32_t id = k->running[--k->count];
    request *q = &c->request[id];
    k->free_pages += q->pages;
    q->pages = q->computed = q->step = 0;
    k->preemptions++;
    return push_front(&k->waiting, id);
}

/* Step 3: gives the next iteration's seconds; 0 if there is nothing to do. */
static double schedule(cluster *c, rank *k) {
    const params *p = &c->p;
    int64_t budget = p->chunk_tokens, before = k->preemptions;
    for (int64_t i = 0; i < k->count && budget > 0; i++) {
        request *q = &c->request[k->running[i]];
        int64_t left = q->prompt + q->generated - q->computed;
        int64_t step = left < budget ? left : budget;
        int fits;
        while (!(fits = reserve(c, k, q, q->computed + step)) && k->count > i + 1)
            if (!preempt(c, k)) c->failed = 1;
        if (!fits) {
            if (!preempt(c, k)) c->failed = 1;
            break;
        }
        q->step = step;
        budget -= step;
    }
    while (k->preemptions == before && budget > 0 && k->count < p->max_running && k->waiting.count) {
        int32_t id = front(&k->waiting);
        request *q = &c->request[id];
        int64_t left = q->prompt + q->generated;
        int64_t step = left < budget ? left : budget;
        if ((left + p->page_tokens - 1) / p->page_tokens > k->free_pages) break;
        reserve(c, k, q, step);
        pop_front(&k->waiting);
        k->running[k->count++] = id;
        q->step = step;
        budget -= step;
    }
    int64_t prefill = 0, pairs = 0, decodes = 0, context = 0;
    for (int64_t i = 0; i < k->count; i++) {
        const request *q = &c->request[k->running[i]];
        if (!q->step) continue;
        if (q->generated && q->computed + 1 == q->prompt + q->generated) {
            decodes++;
            context += q->computed;
        } else {
            prefill += q->step;
            pairs += q->step * (2 * q->computed + q->step);
        }
    }
    if (!prefill && !decodes) return 0.0;
    return p->base_s + p->prefill_s * (double)prefill + p->attention_s * (0.5 * (double)pairs) + p->decode_s * (double)decodes +
           p->context_s * (double)context;
}

static void boundary(cluster *c, int64_t r, double at) {
    rank *k = &c->rank[r];
    int was_busy = k->busy;
    if (was_busy) produce(c, r, at);
    load early = now_of(c, k, at);
    while (k->inbox.count && c->request[front(&k->inbox)].reach <= at) {
        if (!push_back(&k->waiting, front(&k->inbox))) c->failed = 1;
        pop_front(&k->inbox);
    }
    double taken = schedule(c, k);
    load l = c->p.publish_early ? early : now_of(c, k, at);
    if (was_busy || !c->p.publish_early) c->mailbox[r] = l;
    k->busy = taken > 0.0;
    if (k->busy) {
        k->iterations++;
        k->end = at + taken;
    } else {
        k->end = at;
        if (was_busy)
            for (int64_t f = 0; f < c->frontends; f++) {
                int64_t cell = r * c->frontends + f, n = c->ring_count[cell];
                const load *last = &c->ring[cell * RING + (n + RING - 1) % RING];
                if (n && (last->running || last->waiting)) ride(c, r, f, l);
            }
    }
    if (++k->since_rare >= c->rare_every || !k->busy) {
        c->rare[r] = l;
        k->since_rare = 0;
    }
}

/* ---- the doors ------------------------------------------------------------------------------------------------- */

void ranks_free(cluster *c) {
    if (!c) return;
    for (int64_t r = 0; c->rank && r < c->ranks; r++) {
        free(c->rank[r].running);
        free(c->rank[r].waiting.items);
        free(c->rank[r].inbox.items);
    }
    free(c->rank);
    free(c->request);
    free(c->mailbox);
    free(c->rare);
    free(c->ring);
    free(c->ring_count);
    free(c->spoken);
    free(c->events);
    free(c);
}

cluster *ranks_new(int64_t ranks, int64_t frontends, int64_t requests, int64_t rare_every, const params *p) {
    cluster *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->p = *p;
    c->ranks = ranks;
    c->frontends = frontends;
    c->rare_every = rare_every;
    c->rank = calloc((size_t)ranks, sizeof *c->rank);
    c->request = calloc((size_t)requests, sizeof *c->request);
    c->mailbox = calloc((size_t)ranks, sizeof *c->mailbox);
    c->rare = calloc((size_t)ranks, sizeof *c->rare);
    c->ring = calloc((size_t)(ranks * frontends * RING), sizeof *c->ring);
    c->ring_count = calloc((size_t)(ranks * frontends), sizeof *c->ring_count);
    c->spoken = calloc((size_t)frontends, 1);
    int good = c->rank && c->request && c->mailbox && c->rare && c->ring && c->ring_count && c->spoken;
    for (int64_t r = 0; good && r < ranks; r++) {
        c->rank[r].free_pages = p->kv_pages;
        c->rank[r].running = malloc((size_t)p->max_running * sizeof *c->rank[r].running);
        good = c->rank[r].running != NULL;
    }
    if (good) return c;
    ranks_free(c);
    return NULL;
}

/* Requests reach a rank in the order of their times. */
int ranks_submit(cluster *c, int64_t r, int64_t id, int64_t frontend, double reach, int64_t prompt, int64_t output) {
    c->request[id] = (request){.reach = reach, .prompt = prompt, .output = output, .frontend = (int32_t)frontend};
    return push_back(&c->rank[r].inbox, (int32_t)id);
}

/* Runs every rank through its boundaries at or before `until`; gives the number of events, or -1 without memory. */
int64_t ranks_advance(cluster *c, double until) {
    c->event_count = 0;
    for (int64_t r = 0; r < c->ranks; r++) {
        rank *k = &c->rank[r];
        for (;;) {
            double at = k->end;
            if (!k->busy) {
                if (!k->inbox.count) break;
                double reach = c->request[front(&k->inbox)].reach;
                if (reach > at) at = reach;
            }
            if (at > until) break;
            boundary(c, r, at);
        }
    }
    return c->failed ? -1 : c->event_count;
}

const event *ranks_events(const cluster *c) { return c->events; }
const load *ranks_mailbox(const cluster *c) { return c->mailbox; }
const load *ranks_rare(const cluster *c) { return c->rare; }

/* The newest piggyback of every rank that had left for this frontend by `sent` (at = -1: none); 0 if it is overwritten already. */
int ranks_piggyback(const cluster *c, int64_t frontend, double sent, load *out) {
    for (int64_t r = 0; r < c->ranks; r++) {
        int64_t cell = r * c->frontends + frontend, n = c->ring_count[cell], back = 1;
        while (back <= n && back <= RING && c->ring[cell * RING + (n - back) % RING].at > sent) back++;
        if (back > RING) return 0;
        out[r] = back > n ? (load){-1.0, 0, 0, 0} : c->ring[cell * RING + (n - back) % RING];
    }
    return 1;
}

/* Of each rank: iterations, preemptions, free pages, running, waiting (with the inbox). */
void ranks_totals(const cluster *c, int64_t *out) {
    for (int64_t r = 0; r < c->ranks; r++) {
        const rank *k = &c->rank[r];
        int64_t *row = out + 5 * r;
        row[0] = k->iterations;
        row[1] = k->preemptions;
        row[2] = k->free_pages;
        row[3] = k->count;
        row[4] = k->waiting.count + k->inbox.count;
    }
}
