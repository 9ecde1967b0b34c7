/* loadbox.h - the loadbox segment, ABI 1: its layout and its latch.
 *
 * The one definition of what lies in a rank's shared memory.  C11 or C++11, gcc or clang, no dependency beyond the C library;
 * usable alone, from any language that can include or bind a C header.  Linux, 64-bit, little-endian.
 *
 * LAYOUT.  A rank's segment is the POSIX shared-memory object /loadbox.<group>.<rank>, LBX_SEGMENT_SIZE bytes, all words 8 bytes
 * wide and 8-byte aligned, so that no word crosses a cache line:
 *
 *        0  header, 128 bytes (lbx_header).  The magic is stored last, with release: it is the ready flag.
 *      128  line A: seq | num_running | num_waiting | kv_active_pages | kv_total_pages | published_ns | epoch
 *      192  line B: the same six words once more, without a sequence
 *      240  zero, reserved.  A reader skips what it does not know within one ABI major.
 *
 * A frontend's dispatch board, /loadbox.<group>.f.<16 hex digits>, has the same header with kind LBX_KIND_BOARD, then `capacity`
 * words from offset 128 on, one a rank (lbx_board_pack).
 *
 * kv_total_pages == 0 means "no snapshot": a fresh segment is zeros and is never mistaken for an idle rank.
 *
 * THE LATCH.  Two copies under one sequence.  While the sequence is odd the writer is busy with copy A and readers use B; while it
 * is even the writer may be busy with B and readers use A.  So a reader never waits for a writer, alive or dead:
 *
 *     publish:  store_release(seq, q+1); fence(release); A := v (relaxed, word by word)
 *               store_release(seq, q+2); fence(release); B := v (relaxed)
 *     read:     s = load_acquire(seq); copy = s odd ? B : A; words relaxed; fence(acquire); accept if load_relaxed(seq) == s
 *     repair:   q = load_acquire(seq); fence(release); odd: A := B, store_release(seq, q+1); even: B := A
 *
 * Why it is right.  Suppose a reader accepts s and saw a word of a later publish in its copy.  That word was stored after a
 * release fence that follows the store of the next sequence number; the reader's acquire fence follows its load of the word; the
 * two fences synchronise, so its second load of seq must see that number, and it does not accept.  Suppose instead that it saw a
 * word of an earlier publish: the words of copy X precede, in the writer, the *release* store of the sequence number that sends
 * readers to X, and the reader's first load of seq is an acquire, so it sees them all.  For that both stores of seq must be
 * release: a relaxed first store lets the previous publish's B be overtaken, and readers of the odd number tear
 * (proof/l2_relaxed.litmus).
 *
 * A writer killed between any two steps leaves one whole copy, the one that the sequence points at.  A new writer of the same
 * memory MUST call lbx_repair before its first publish: the copy that readers do not use may be half written, and the next
 * publish would send them to it (proof/latch.pml, variant NO_REPAIR).  The sequence never goes back.
 */
#ifndef LOADBOX_H
#define LOADBOX_H

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
#define LBX_STATIC_ASSERT(what, why) static_assert(what, why)
extern "C" {
#else
#define LBX_STATIC_ASSERT(what, why) _Static_assert(what, why)
#endif

#if !defined(__LP64__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "loadbox needs a 64-bit little-endian machine"
#endif

#define LBX_MAGIC UINT64_C(0x00584F4244414F4C) /* the bytes "LOADBOX\0" */
#define LBX_ABI_MAJOR UINT64_C(1)
#define LBX_ABI_MINOR UINT64_C(0)
#define LBX_SEGMENT_SIZE 4096 /* never the page size: AArch64 kernels may have pages of 64 KiB */
#define LBX_RECORD_OFFSET 128
#define LBX_KIND_RANK UINT64_C(1)
#define LBX_KIND_BOARD UINT64_C(2)
#define LBX_STATE_OPEN UINT64_C(1)
#define LBX_STATE_CLOSED UINT64_C(2)
#define LBX_EPOCH_LIMIT (UINT64_C(1) << 62) /* 1 <= epoch < 2^62: an epoch is also the offset of a lock, which is signed */
#define LBX_READ_TRIES 64

/* ---- layout ------------------------------------------------------------------------------------------------------------- */

typedef struct lbx_header {
    uint64_t magic;         /* LBX_MAGIC, stored last */
    uint64_t abi_major;     /* another major: do not read on */
    uint64_t abi_minor;     /* grows when a reserved word gets a meaning that old readers may ignore */
    uint64_t kind;          /* LBX_KIND_RANK or LBX_KIND_BOARD */
    uint64_t record_offset; /* LBX_RECORD_OFFSET */
    uint64_t rank;          /* the rank that this segment speaks for; 0 on a board */
    uint64_t dp_size;       /* ranks in the group, 0 if the writer was not told */
    uint64_t owner_pid;     /* to print, never to trust: pids are per namespace and come round again */
    uint64_t start_ns;      /* CLOCK_REALTIME at the start of this life, ns, to print */
    uint64_t state;         /* LBX_STATE_OPEN or LBX_STATE_CLOSED */
    uint64_t boot_id[2];    /* /proc/sys/kernel/random/boot_id, its 16 bytes in the order written; zeros: not known */
    uint64_t time_ns_inode; /* inode of the writer's /proc/self/ns/time; 0: not known, its clock is not comparable */
    uint64_t capacity;      /* board: number of words; 0 for a rank */
    uint64_t epoch;         /* board: the epoch of its life (a rank's is in its record); 0 for a rank */
    uint64_t reserved;
} lbx_header;

typedef struct lbx_words {
    int64_t num_running;
    int64_t num_waiting;
    int64_t kv_active_pages;
    int64_t kv_total_pages; /* 0: no snapshot */
    int64_t published_ns;   /* CLOCK_MONOTONIC of the writer's time namespace */
    uint64_t epoch;         /* random, new for each life of a writer */
} lbx_words;

typedef struct lbx_segment {
    lbx_header header;
    uint64_t seq;
    lbx_words a;
    uint64_t pad;
    lbx_words b;
    uint8_t reserved[LBX_SEGMENT_SIZE - 240];
} lbx_segment;

LBX_STATIC_ASSERT(offsetof(lbx_header, magic) == 0, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, abi_major) == 8, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, abi_minor) == 16, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, kind) == 24, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, record_offset) == 32, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, rank) == 40, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, dp_size) == 48, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, owner_pid) == 56, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, start_ns) == 64, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, state) == 72, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, boot_id) == 80, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, time_ns_inode) == 96, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, capacity) == 104, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_header, epoch) == 112, "ABI 1");
LBX_STATIC_ASSERT(sizeof(lbx_header) == LBX_RECORD_OFFSET, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_words, num_running) == 0, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_words, num_waiting) == 8, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_words, kv_active_pages) == 16, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_words, kv_total_pages) == 24, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_words, published_ns) == 32, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_words, epoch) == 40, "ABI 1");
LBX_STATIC_ASSERT(sizeof(lbx_words) == 48, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_segment, seq) == 128, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_segment, a) == 136, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_segment, b) == 192, "ABI 1");
LBX_STATIC_ASSERT(sizeof(lbx_segment) == LBX_SEGMENT_SIZE, "ABI 1");
LBX_STATIC_ASSERT(offsetof(lbx_segment, seq) / 64 == (offsetof(lbx_segment, a) + sizeof(lbx_words) - 1) / 64,
                  "sequence and copy A share one cache line: a quiet read touches one");
LBX_STATIC_ASSERT(offsetof(lbx_segment, b) / 64 == (offsetof(lbx_segment, b) + sizeof(lbx_words) - 1) / 64,
                  "copy B lies in one cache line");

/* ---- kill points -------------------------------------------------------------------------------------------------------- */

/* A test build defines LBX_KILL_POINTS and supplies lbx_kill_point, which kills the process at a chosen step. */
#ifdef LBX_KILL_POINTS
void lbx_kill_point(void);
#else
static inline void lbx_kill_point(void) {}
#endif

/* ---- words -------------------------------------------------------------------------------------------------------------- */

/* The compiler's atomics on plain words, not <stdatomic.h>: those of C11 are not C++, and these are the same instructions. */

static inline uint64_t lbx_load(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint64_t lbx_load_acquire(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void lbx_store(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void lbx_store_release(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

static inline void lbx_words_load(lbx_words *to, const lbx_words *from)
{
    to->num_running = __atomic_load_n(&from->num_running, __ATOMIC_RELAXED);
    to->num_waiting = __atomic_load_n(&from->num_waiting, __ATOMIC_RELAXED);
    to->kv_active_pages = __atomic_load_n(&from->kv_active_pages, __ATOMIC_RELAXED);
    to->kv_total_pages = __atomic_load_n(&from->kv_total_pages, __ATOMIC_RELAXED);
    to->published_ns = __atomic_load_n(&from->published_ns, __ATOMIC_RELAXED);
    to->epoch = __atomic_load_n(&from->epoch, __ATOMIC_RELAXED);
}

static inline void lbx_words_store(lbx_words *to, const lbx_words *from)
{
    __atomic_store_n(&to->num_running, from->num_running, __ATOMIC_RELAXED);
    lbx_kill_point();
    __atomic_store_n(&to->num_waiting, from->num_waiting, __ATOMIC_RELAXED);
    lbx_kill_point();
    __atomic_store_n(&to->kv_active_pages, from->kv_active_pages, __ATOMIC_RELAXED);
    lbx_kill_point();
    __atomic_store_n(&to->kv_total_pages, from->kv_total_pages, __ATOMIC_RELAXED);
    lbx_kill_point();
    __atomic_store_n(&to->published_ns, from->published_ns, __ATOMIC_RELAXED);
    lbx_kill_point();
    __atomic_store_n(&to->epoch, from->epoch, __ATOMIC_RELAXED);
    lbx_kill_point();
}

/* ---- the latch ---------------------------------------------------------------------------------------------------------- */

/* Publish v.  One writer at a time; no system call, no loop, no branch on what readers do. */
static inline void lbx_publish(lbx_segment *s, const lbx_words *v)
{
    uint64_t q = lbx_load(&s->seq);

    lbx_kill_point();
    lbx_store_release(&s->seq, q + 1);
    lbx_kill_point();
    __atomic_thread_fence(__ATOMIC_RELEASE);
    lbx_words_store(&s->a, v);
    lbx_store_release(&s->seq, q + 2);
    lbx_kill_point();
    __atomic_thread_fence(__ATOMIC_RELEASE);
    lbx_words_store(&s->b, v);
}

/* Make both copies whole again after a writer that may have died half-way.  Only under the owner's lock. */
static inline void lbx_repair(lbx_segment *s)
{
    uint64_t q = lbx_load_acquire(&s->seq);
    lbx_words v;

    lbx_kill_point();
    __atomic_thread_fence(__ATOMIC_RELEASE);
    if (q & 1) {
        lbx_words_load(&v, &s->b);
        lbx_words_store(&s->a, &v);
        lbx_store_release(&s->seq, q + 1);
    } else {
        lbx_words_load(&v, &s->a);
        lbx_words_store(&s->b, &v);
    }
    lbx_kill_point();
}

/* Try once.  1: *seq and *v are one whole publish.  0: the writer moved meanwhile, *v is not to be used. */
static inline int lbx_try_read(const lbx_segment *s, uint64_t *seq, lbx_words *v)
{
    uint64_t q = lbx_load_acquire(&s->seq);

    lbx_words_load(v, q & 1 ? &s->b : &s->a);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    *seq = q;
    return lbx_load(&s->seq) == q;
}

/* Read, trying again at most LBX_READ_TRIES times, and only while the sequence moves.  0: it moved every time; keep the last
 * good value that you had of this inode and epoch. */
static inline int lbx_read(const lbx_segment *s, uint64_t *seq, lbx_words *v)
{
    int i;

    for (i = 0; i < LBX_READ_TRIES; i++)
        if (lbx_try_read(s, seq, v))
            return 1;
    return 0;
}

/* ---- whose it is -------------------------------------------------------------------------------------------------------- */

/* Is a record one that a writer could have published?  Anything else came from somebody who does not keep the rules. */
static inline int lbx_words_valid(const lbx_words *v)
{
    return (v->num_running | v->num_waiting | v->kv_active_pages | v->kv_total_pages | v->published_ns) >= 0
        && (v->kv_total_pages == 0 || v->kv_active_pages <= v->kv_total_pages)
        && v->epoch - 1 < LBX_EPOCH_LIMIT - 1;
}

/* Does the life `epoch` still hold its lock?  The owner holds a write lock on the byte at offset `epoch` (past the end of the
 * file, which is legal), on an open file description of its own; the kernel drops it when the owner dies, however it dies.
 * fd: open for reading, the asker's own.  1: alive.  0: gone.  -1: cannot be asked, errno says why.
 * Asks with F_RDLCK: with F_WRLCK, another reader's shared lock would pass for an owner. */
static inline int lbx_owner_alive(int fd, uint64_t epoch)
{
    struct flock lock;

    memset(&lock, 0, sizeof lock);
    lock.l_type = F_RDLCK;
    lock.l_whence = 0; /* SEEK_SET */
    lock.l_start = (off_t)epoch;
    lock.l_len = 1;
    if (fcntl(fd, 36 /* F_OFD_GETLK; its name needs _GNU_SOURCE */, &lock) == -1)
        return -1;
    return lock.l_type != F_UNLCK;
}

/* ---- the dispatch board ------------------------------------------------------------------------------------------------- */

/* One word a rank, changed by one store; no invariant spans words, so a board needs no latch. */
static inline uint64_t lbx_board_pack(uint32_t in_flight, uint32_t owed_first_token)
{
    return (uint64_t)owed_first_token << 32 | in_flight;
}
static inline uint32_t lbx_board_in_flight(uint64_t word) { return (uint32_t)word; }
static inline uint32_t lbx_board_owed(uint64_t word) { return (uint32_t)(word >> 32); }
static inline uint64_t *lbx_board_words(void *segment) { return (uint64_t *)(void *)((char *)segment + LBX_RECORD_OFFSET); }

#ifdef __cplusplus
}
#endif
#endif
