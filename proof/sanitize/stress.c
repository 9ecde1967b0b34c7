/* loadbox.h under a sanitizer: many lives of a writer, each cut short at some step, with readers at work all along.
 *
 * A life is a thread; joining it stands for the lock that the kernel passes on.  It repairs, then publishes until its death, which is
 * a jump out of the middle of lbx_publish or lbx_repair (an LBX_KILL_POINTS build of the header).  At every step the writer's thread
 * itself looks, too: a reader must find a whole record at once, whatever the step.
 *
 * ThreadSanitizer proves here that every access to shared words is atomic; of fences it knows nothing (see order.pml, aarch64.py).
 *
 * Faults to be found, by -D: RACE, READ_RACE (ThreadSanitizer), OVERFLOW (AddressSanitizer), MISALIGNED (UBSan), NO_REPAIR (the
 * readers' own check). */
#define LBX_KILL_POINTS
#include "loadbox.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

enum { READERS = 3, LIVES = 600, PUBLISHES = 4, STEPS = 70 };

static lbx_segment *segment;
static int stop;
static _Thread_local jmp_buf death;
static _Thread_local long steps_left;
static _Thread_local int living;

static void fail(const char *what, uint64_t seq, const lbx_words *v)
{
    fprintf(stderr, "%s at sequence %llu: %lld %lld %lld %lld %lld %llu\n", what, (unsigned long long)seq, (long long)v->num_running,
            (long long)v->num_waiting, (long long)v->kv_active_pages, (long long)v->kv_total_pages, (long long)v->published_ns,
            (unsigned long long)v->epoch);
    exit(3);
}

static lbx_words record(int64_t n)
{
    const lbx_words v = {n, 2 * n, 3 * n, 4 * n, 5 * n, 6 * (uint64_t)n};

    return v;
}

/* Check a record; its number. */
static int64_t whole(uint64_t seq, const lbx_words *v)
{
    const lbx_words expected = record(v->num_running);

    if (memcmp(v, &expected, sizeof expected) != 0)
        fail("torn", seq, v);
    return v->num_running;
}

void lbx_kill_point(void)
{
    uint64_t seq;
    lbx_words v;

    if (!living)
        return;
    if (!lbx_try_read(segment, &seq, &v))
        fail("not readable at once", seq, &v);
    whole(seq, &v);
    if (steps_left-- == 0)
        longjmp(death, 1);
}

struct life {
    int64_t first;
    long steps;
};

static void *live(void *argument)
{
    const struct life *life = argument;
    volatile int64_t n;
    lbx_words v;

    living = 1;
    steps_left = life->steps;
    if (setjmp(death) == 0) {
#ifndef NO_REPAIR
        lbx_repair(segment);
#endif
#ifdef RACE
        *(volatile int64_t *)&segment->b.num_waiting = segment->b.num_waiting;
#endif
        for (n = life->first; n < life->first + PUBLISHES; n++) {
            v = record(n);
            lbx_publish(segment, &v);
        }
    }
    living = 0;
    return NULL;
}

static void *look(void *unused)
{
    uint64_t seq, last_seq = 0;
    int64_t n, last_n = 0;
    lbx_words v;
    long accepted = 0;

    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
#ifdef READ_RACE
        (void)*(volatile int64_t *)&segment->a.num_waiting;
#endif
        if (!lbx_read(segment, &seq, &v))
            continue;
        n = whole(seq, &v);
        if (seq < last_seq || n < last_n)
            fail("older than the record before", seq, &v);
        last_seq = seq;
        last_n = n;
        accepted++;
    }
    (void)unused;
    return accepted ? &stop : NULL;
}

int main(void)
{
    pthread_t readers[READERS], writer;
    struct life life = {1, 0};
    void *accepted;
    int i;

    segment = aligned_alloc(64, sizeof *segment);
    if (segment == NULL)
        return 2;
    memset(segment, 0, sizeof *segment);
#ifdef OVERFLOW
    {
        lbx_words v;

        lbx_words_load(&v, (const lbx_words *)(const void *)((const char *)segment + LBX_SEGMENT_SIZE - 16));
    }
#endif
#ifdef MISALIGNED
    {
        lbx_words v;

        lbx_words_load(&v, (const lbx_words *)(const void *)((const char *)segment + 132));
    }
#endif
    for (i = 0; i < READERS; i++)
        if (pthread_create(&readers[i], NULL, look, NULL) != 0)
            return 2;
    for (i = 0; i < LIVES; i++, life.first += PUBLISHES) {
        life.steps = i % STEPS;
        if (pthread_create(&writer, NULL, live, &life) != 0)
            return 2;
        pthread_join(writer, NULL);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (i = 0; i < READERS; i++) {
        pthread_join(readers[i], &accepted);
        if (accepted == NULL)
            fail("a reader accepted nothing", segment->seq, &segment->a);
    }
    printf("%d lives, sequence %llu\n", LIVES, (unsigned long long)segment->seq);
    free(segment);
    return 0;
}
