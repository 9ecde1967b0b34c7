/* The floor: loadbox.h alone, without Python.  Prints one JSON object of nanoseconds.
 *
 *   floor latch              the bare latch against a plain 48-byte copy
 *   floor trip               one cache line to another core and back, as two threads bounce it, each on its core; null if there is one
 *   floor count WHAT N       N publishes or reads and nothing else, for a counter of instructions
 *   floor contend SECONDS N  one writer storing to one bare cache line that N threads read without pause, and the latch likewise */
#define _GNU_SOURCE
#include "loadbox.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ROUNDS = 41, CALLS = 200000 };

static lbx_segment segment __attribute__((aligned(4096)));
static lbx_words words = {1, 2, 3, 4, 5, 6};
static volatile int stop;

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* Nothing before this may be moved behind it, or dropped. */
static inline void keep(const void *p) { __asm__ volatile("" : : "r"(p) : "memory"); }

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v)
{
    qsort(v, ROUNDS, sizeof *v, by_size);
    return v[ROUNDS / 2];
}

/* Each as a call, as another language makes it, and as the compiler inlines it into a loop. */
#define NOINLINE __attribute__((noinline))
static lbx_words target;
static uint64_t target_seq;
static inline void copy_48(void) { memcpy(&target, &words, sizeof target); keep(&target); }
static inline void publish_once(void) { lbx_publish(&segment, &words); keep(&segment); }
static inline void read_once(void) { lbx_read(&segment, &target_seq, &target); keep(&target); }
static NOINLINE void called_copy(void) { copy_48(); }
static NOINLINE void called_publish(void) { publish_once(); }
static NOINLINE void called_read(void) { read_once(); }

#define TIME(into, what) \
    do { \
        double t = now_ns(); \
        for (i = 0; i < CALLS; i++) \
            what(); \
        into[r] = (now_ns() - t) / CALLS; \
    } while (0)

static void latch(void)
{
    static double v[6][ROUNDS];
    int r, i;

    for (r = 0; r < ROUNDS; r++) {
        TIME(v[0], called_copy);
        TIME(v[1], called_publish);
        TIME(v[2], called_read);
        TIME(v[3], copy_48);
        TIME(v[4], publish_once);
        TIME(v[5], read_once);
    }
    printf("{\"copy_48_bytes\": %.2f, \"publish\": %.2f, \"read\": %.2f, "
           "\"inlined_copy_48_bytes\": %.2f, \"inlined_publish\": %.2f, \"inlined_read\": %.2f}\n",
           median(v[0]), median(v[1]), median(v[2]), median(v[3]), median(v[4]), median(v[5]));
}

static void *read_line(void *unused)
{
    (void)unused;
    while (!stop)
        lbx_load(&segment.seq);
    return NULL;
}

static void *read_latch(void *unused)
{
    lbx_words to;
    uint64_t seq;

    (void)unused;
    while (!stop)
        lbx_read(&segment, &seq, &to);
    return NULL;
}

static double contended(void *(*reader)(void *), int n, double seconds, int publish)
{
    pthread_t threads[64];
    double start, end;
    long calls = 0;
    int i;

    stop = 0;
    for (i = 0; i < n; i++)
        pthread_create(&threads[i], NULL, reader, NULL);
    start = now_ns();
    do {
        for (i = 0; i < 1000; i++, calls++) {
            if (publish)
                lbx_publish(&segment, &words);
            else
                lbx_store_release(&segment.seq, (uint64_t)calls * 2);
            keep(&segment);
        }
        end = now_ns();
    } while (end - start < seconds * 1e9);
    stop = 1;
    for (i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    return (end - start) / (double)calls;
}

static volatile uint64_t ball __attribute__((aligned(64)));

static void *return_ball(void *unused)
{
    uint64_t seen;

    (void)unused;
    while (!stop)
        if ((seen = lbx_load_acquire((const uint64_t *)&ball)) & 1)
            lbx_store_release((uint64_t *)&ball, seen + 1);
    return NULL;
}

/* The first and the last core that this process may run on; 0 if there is only one. */
static int two_cores(int *first, int *last)
{
    cpu_set_t mine;
    int c;

    *first = *last = -1;
    if (sched_getaffinity(0, sizeof mine, &mine) != 0)
        return 0;
    for (c = 0; c < CPU_SETSIZE; c++)
        if (CPU_ISSET(c, &mine)) {
            *first = *first < 0 ? c : *first;
            *last = c;
        }
    return *first != *last;
}

static int pin(pthread_t thread, int core)
{
    cpu_set_t one;

    CPU_ZERO(&one);
    CPU_SET(core, &one);
    return pthread_setaffinity_np(thread, sizeof one, &one) == 0;
}

/* The median of short rounds: in one of them a thread may have been off its core.  Negative without two cores. */
static double round_trip(void)
{
    enum { TRIPS = 10000 };
    static double rounds[ROUNDS];
    pthread_t thread;
    uint64_t trips = 0;
    int r, i, first, last;

    if (!two_cores(&first, &last))
        return -1;
    pthread_create(&thread, NULL, return_ball, NULL);
    if (!pin(pthread_self(), first) || !pin(thread, last)) {
        stop = 1;
        pthread_join(thread, NULL);
        return -1;
    }
    for (r = 0; r < ROUNDS; r++) {
        double start = now_ns();
        for (i = 0; i < TRIPS; i++, trips++) {
            lbx_store_release((uint64_t *)&ball, 2 * trips + 1);
            while (lbx_load_acquire((const uint64_t *)&ball) & 1)
                ;
        }
        rounds[r] = (now_ns() - start) / TRIPS;
    }
    stop = 1;
    pthread_join(thread, NULL);
    return median(rounds);
}

static void count(int publish, long n)
{
    while (n-- > 0)
        if (publish)
            called_publish();
        else
            called_read();
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "count") == 0) {
        count(strcmp(argv[2], "publish") == 0, atol(argv[3]));
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "trip") == 0) {
        double ns = round_trip();
        if (ns < 0)
            puts("{\"round_trip\": null}");
        else
            printf("{\"round_trip\": %.2f}\n", ns);
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "latch") == 0) {
        latch();
        return 0;
    }
    if (argc == 4 && strcmp(argv[1], "contend") == 0 && atoi(argv[3]) > 0 && atoi(argv[3]) <= 64) {
        double seconds = atof(argv[2]);
        int n = atoi(argv[3]);
        double line = contended(read_line, n, seconds, 0);
        printf("{\"bare_line\": %.2f, \"latch\": %.2f}\n", line, contended(read_latch, n, seconds, 1));
        return 0;
    }
    fprintf(stderr, "usage: floor latch | floor contend SECONDS READERS | floor trip | floor count publish|read N\n");
    return 2;
}
