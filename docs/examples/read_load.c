/* Reads a rank's load, from C, with mailbox/loadbox.h alone:  read_load GROUP RANK
 *
 *     cc -std=c11 -O2 -Imailbox docs/examples/read_load.c -o read_load
 *
 * Prints "LIVE 17 3 4200 25000", or another state; a rank that is not LIVE has no numbers.  It trusts only its own user's files.
 * It looks once, so a rank whose clock is not comparable, or that stopped in the middle of a publish, is LIVE here; only a reader
 * that goes on looking can tell that it is STALLED. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "loadbox.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const int64_t stall_after_ns = INT64_C(5000000000);

/* This boot's id as a header has it, 16 bytes; zeros where it cannot be had. */
static void read_boot_id(unsigned char id[16])
{
    char text[64] = "", *c = text;
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    int i;

    memset(id, 0, 16);
    if (file == NULL)
        return;
    if (fgets(text, sizeof text, file) != NULL) {
        for (i = 0; i < 16 && sscanf(c, "%2hhx", &id[i]) == 1; i++) {
            c += 2;
            c += *c == '-';
        }
        if (i < 16) /* something else: not known */
            memset(id, 0, 16);
    }
    fclose(file);
}

static int of_another_boot(const lbx_segment *s)
{
    static const unsigned char unknown[16] = {0};
    const void *made = s->header.boot_id;
    unsigned char here[16];

    read_boot_id(here);
    return memcmp(here, unknown, 16) != 0 && memcmp(made, unknown, 16) != 0 && memcmp(here, made, 16) != 0;
}

/* Open and judge: nothing is followed, nothing is waited for, nothing foreign is believed. */
static const lbx_segment *attach(const char *name, uint64_t rank, int *fd, const char **why)
{
    struct stat found;
    lbx_segment *s;

    *fd = open(name, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    *why = *fd < 0 && errno == ENOENT ? "ABSENT" : "REFUSED";
    if (*fd < 0 || fstat(*fd, &found) != 0)
        return NULL;
    if (!S_ISREG(found.st_mode) || found.st_uid != geteuid() || found.st_mode & (S_IWGRP | S_IWOTH) || found.st_nlink > 1)
        return NULL;
    if (found.st_size == 0 || found.st_nlink == 0) { /* being made, or removed just now */
        *why = "ABSENT";
        return NULL;
    }
    if (found.st_size < LBX_SEGMENT_SIZE || found.st_blocks == 0) /* longer is a newer minor's */
        return NULL;
    s = (lbx_segment *)mmap(NULL, LBX_SEGMENT_SIZE, PROT_READ, MAP_SHARED, *fd, 0);
    if (s == MAP_FAILED)
        return NULL;
    if (lbx_load_acquire(&s->header.magic) == 0) { /* being made */
        *why = "ABSENT";
        return NULL;
    }
    if (s->header.magic != LBX_MAGIC || s->header.abi_major != LBX_ABI_MAJOR || s->header.kind != LBX_KIND_RANK
        || s->header.record_offset != LBX_RECORD_OFFSET || s->header.rank != rank)
        return NULL;
    if (of_another_boot(s)) {
        *why = "ABSENT";
        return NULL;
    }
    return s;
}

/* Nanoseconds since the publish; -1 if the writer's clock is not ours. */
static int64_t age_ns(const lbx_segment *s, const lbx_words *v)
{
    struct timespec t;
    struct stat mine;
    int64_t age;

    if (stat("/proc/self/ns/time", &mine) != 0 || s->header.time_ns_inode != mine.st_ino)
        return -1;
    clock_gettime(CLOCK_MONOTONIC, &t);
    age = t.tv_sec * INT64_C(1000000000) + t.tv_nsec - v->published_ns;
    return age < 0 ? -1 : age;
}

static const char *state_of(const lbx_segment *s, int fd, lbx_words *v)
{
    uint64_t seq;
    int alive;

    if (!lbx_read(s, &seq, v)) /* it moved 64 times in a row: a reader that goes on keeps its last value, this one has none */
        return "SILENT";
    if (!lbx_words_valid(v))
        return "REFUSED";
    if (v->kv_total_pages == 0 && lbx_load_acquire(&s->header.state) == LBX_STATE_CLOSED)
        return "CLOSED";
    alive = lbx_owner_alive(fd, v->epoch);
    if (alive != 1)
        return alive == 0 ? "DEAD" : "REFUSED";
    if (v->kv_total_pages == 0)
        return "SILENT";
    return (v->num_running | v->num_waiting) != 0 && age_ns(s, v) > stall_after_ns ? "STALLED" : "LIVE";
}

int main(int argc, char **argv)
{
    const lbx_segment *s;
    const char *state;
    char name[256];
    lbx_words v;
    int fd;

    if (argc != 3) {
        fprintf(stderr, "usage: read_load GROUP RANK\n");
        return 2;
    }
    snprintf(name, sizeof name, "/dev/shm/loadbox.%s.%s", argv[1], argv[2]);
    s = attach(name, strtoull(argv[2], NULL, 10), &fd, &state);
    if (s != NULL)
        state = state_of(s, fd, &v);
    if (s == NULL || strcmp(state, "LIVE") != 0)
        printf("%s\n", state);
    else
        printf("LIVE %lld %lld %lld %lld\n", (long long)v.num_running, (long long)v.num_waiting, (long long)v.kv_active_pages,
               (long long)v.kv_total_pages);
    return 0;
}
