/* Reads a rank's load, from C, with mailbox/loadbox.h alone:  read_load GROUP RANK
 *
 *     cc -std=c11 -O2 -Imailbox docs/examples/read_load.c -o read_load
 *
 * Prints "LIVE 17 3 4200 25000", or another state; a rank that is not LIVE has no numbers.  It trusts only its own user's files. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "loadbox.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const int64_t stall_after_ns = INT64_C(5000000000);

/* Open and judge: nothing is followed, nothing is waited for, nothing foreign is believed. */
static const lbx_segment *attach(const char *name, uint64_t rank, int *fd, const char **why)
{
    struct stat found;
    lbx_segment *s;

    *fd = open(name, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    *why = "ABSENT";
    if (*fd < 0 || fstat(*fd, &found) != 0)
        return NULL;
    if (!S_ISREG(found.st_mode) || found.st_uid != geteuid() || found.st_mode & (S_IWGRP | S_IWOTH) || found.st_nlink > 1) {
        *why = "REFUSED";
        return NULL;
    }
    if (found.st_size != LBX_SEGMENT_SIZE || found.st_blocks == 0 || found.st_nlink == 0)
        return NULL;
    s = (lbx_segment *)mmap(NULL, LBX_SEGMENT_SIZE, PROT_READ, MAP_SHARED, *fd, 0);
    if (s == MAP_FAILED)
        return NULL;
    if (lbx_load_acquire(&s->header.magic) == 0) /* being made */
        return NULL;
    if (s->header.magic != LBX_MAGIC || s->header.abi_major != LBX_ABI_MAJOR || s->header.kind != LBX_KIND_RANK
        || s->header.record_offset != LBX_RECORD_OFFSET || s->header.rank != rank) {
        *why = "REFUSED";
        return NULL;
    }
    return s;
}

static const char *state_of(const lbx_segment *s, int fd, lbx_words *v)
{
    struct timespec t;
    uint64_t seq;

    if (!lbx_read(s, &seq, v)) /* it moved 64 times in a row: a reader that goes on keeps its last value */
        return "STALLED";
    if (lbx_load_acquire(&s->header.state) == LBX_STATE_CLOSED)
        return "CLOSED";
    if (!lbx_words_valid(v))
        return "REFUSED";
    if (lbx_owner_alive(fd, v->epoch) != 1)
        return "DEAD";
    if (v->kv_total_pages == 0)
        return "SILENT";
    clock_gettime(CLOCK_MONOTONIC, &t); /* comparable if the header's time_ns_inode is that of our /proc/self/ns/time */
    if ((v->num_running | v->num_waiting) != 0 && t.tv_sec * INT64_C(1000000000) + t.tv_nsec - v->published_ns > stall_after_ns)
        return "STALLED";
    return "LIVE";
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
