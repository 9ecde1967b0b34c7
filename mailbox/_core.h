/* What the parts of the C core share.  The latch itself is in loadbox.h. */
#ifndef LOADBOX_CORE_H
#define LOADBOX_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <sys/types.h>
#include <time.h>

#include "loadbox.h"

/* Free-threaded builds serialise the methods of one object; elsewhere the interpreter's lock does. */
#ifndef Py_BEGIN_CRITICAL_SECTION
#define Py_BEGIN_CRITICAL_SECTION(op) {
#define Py_END_CRITICAL_SECTION() }
#endif

enum { ABSENT, SILENT, LIVE, STALLED, DEAD, CLOSED, REFUSED, STATES };

/* ---- owners, and what becomes of them in a forked child (_core_owner.c) ------------------------------------------------- */

enum { UNOPENED, ATTACHED, OPEN, FINISHED, FORKED };

typedef struct owner {
    int lock_fd; /* holds the owner's locks; never mapped, so that a child's mapping cannot keep them */
    int status;
    struct owner *next, *prev;
} owner;

void owner_enlist(owner *o);
int owner_delist(owner *o); /* the lock's descriptor, taken out of the fork handler's reach; -1 if it is not ours any more */

/* ---- what the module gives its parts ------------------------------------------------------------------------------------ */

typedef struct {
    PyObject *mailbox_error; /* MailboxError */
    PyObject *check_load;    /* the slow and strict way to four numbers */
    PyTypeObject *snapshot;  /* LoadSnapshot */
    PyTypeObject *deque;     /* collections.deque */
    PyObject *states[STATES];
    int64_t tick_ns;         /* how far CLOCK_MONOTONIC_COARSE may be behind CLOCK_MONOTONIC */
} core_names;

extern core_names core;
extern PyTypeObject writer_type, reader_type, group_type;

static inline int64_t clock_ns(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* One row of the structured array; the dtype is made in _group.py and compared with this by a test. */
typedef struct {
    lbx_words words;
    int32_t rank;
    int8_t state;
    uint8_t usable;
    uint8_t pad[2];
} row;

LBX_STATIC_ASSERT(sizeof(row) == 56, "the dtype's itemsize");

/* Has a name come or gone in the segments' directory?  One stat for all ranks of a group. */
typedef struct {
    uint64_t generation;            /* grows whenever one may have; 0: not asked yet */
    int64_t changed_ns, touched_ns; /* CLOCK_REALTIME, as the directory's mtime and ctime */
    dev_t dev;
    ino_t ino;
    int settled; /* those times are so old that any change since would have left others */
    int asked;   /* in this read */
} watch;

uint64_t watch_generation(watch *w);

enum { FULL_CHECK = 20 }; /* intervals for which the directory's word is enough */

/* Between half of that and all of it, by the phase, so that the full checks of many ranks do not fall into one read. */
static inline int64_t full_check_at(int64_t now, int64_t interval_ns, int64_t phase_ns)
{
    return interval_ns < INT64_MAX / 2 / FULL_CHECK ? now + FULL_CHECK * interval_ns - FULL_CHECK / 2 * phase_ns : INT64_MAX;
}

/* One rank as a reader sees it.  Times are CLOCK_MONOTONIC, ns.  What a quiet read needs stands first. */
typedef struct {
    const lbx_segment *seg; /* NULL: not attached */
    uint64_t seq;
    int64_t quiet_until_ns; /* while the sequence stands and this is not reached, `row` stays true */
    int64_t last_look_ns;   /* -1: none yet */
    row row;
    char have, odd, lost, unasked, same_clock;
    int64_t bound_ns;       /* the publish was not earlier than this; -1: nothing is known of its time */
    lbx_words words;        /* the last whole record */
    int64_t next_check_ns, first_seen_ns, owner_seen_ns, asked_ns;
    int64_t full_check_ns;         /* until then the directory's word is enough */
    uint64_t file_seen, name_seen; /* the directory's generations in which the file, and the name, were last looked at */
    int nameless;                  /* then there was no such name */
    int64_t phase_ns;     /* the first checks are this much early: so those of many ranks do not all fall into one read */
    uint64_t dp_size;       /* what the header says, 0: nothing */
    uint64_t my_time_ns;  /* inode of the reader's time namespace */
    int fd;
    dev_t dev;
    ino_t ino;
    PyObject *reason;     /* NULL or a str */
} slot;

/* Give a subclass method descriptors of its own.  CPython's interpreter takes its fast way to a C method only if the object's type
 * is exactly the descriptor's (PRECALL_NO_KW_METHOD_DESCRIPTOR_* in 3.11, CALL_METHOD_DESCRIPTOR_* since); inherited ones cost a
 * fifth of a read.  A method that a class overrides stays overridden. */
PyObject *own_methods(PyTypeObject *type, PyMethodDef *methods);

void slot_init(slot *s, int64_t phase_ns);
void slot_drop(slot *s);
/* changed?  -1: exception.  Without a watch, every check asks for the file itself. */
int slot_look(slot *s, int64_t now, int64_t interval_ns, watch *w, PyObject *owner, Py_ssize_t rank);
int slot_state(slot *s, int64_t now, int64_t interval_ns, int64_t stall_ns);                /* -1: exception */
int slot_row(slot *s, int64_t now, int64_t interval_ns, int64_t stall_ns, Py_ssize_t rank); /* fills s->row.  -1: exception */
int64_t slot_age(const slot *s, int64_t now);                                               /* -1: not known */

static inline int need_open(int open)
{
    if (!open)
        PyErr_SetString(core.mailbox_error, "this reader is closed");
    return open;
}

static inline PyObject *slot_reason(const slot *s) { return Py_NewRef(s->reason != NULL ? s->reason : Py_None); }

static inline int slot_has_snapshot(const slot *s)
{
    return s->seg != NULL && !s->odd && !s->unasked && s->words.kv_total_pages > 0;
}

#endif
