/* One rank as a reader sees it.  The twin of _slot_py.py, where the rules stand in prose: same rules, same order, same words. */
#include "_core.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define LONG_AGO (-(INT64_C(1) << 62))

enum { NO_NAME = -2 };

static void forget_owner(slot *s)
{
    s->owner_seen_ns = s->asked_ns = LONG_AGO;
    s->lost = s->unasked = 0;
}

static void forget(slot *s)
{
    s->have = s->same_clock = s->odd = 0;
    s->seq = 0;
    memset(&s->words, 0, sizeof s->words);
    s->bound_ns = s->last_look_ns = -1;
    s->dp_size = 0;
    s->first_seen_ns = s->quiet_until_ns = 0;
    s->dev = 0;
    s->ino = 0;
    forget_owner(s);
}

void slot_init(slot *s, int64_t phase_ns)
{
    memset(s, 0, sizeof *s);
    s->fd = -1;
    s->phase_ns = phase_ns;
    forget(s);
}

/* Let go of the mapping and of what was read from it. */
void slot_drop(slot *s)
{
    if (s->seg != NULL)
        munmap((void *)s->seg, LBX_SEGMENT_SIZE);
    s->seg = NULL;
    if (s->fd >= 0)
        close(s->fd);
    s->fd = -1;
    forget(s);
}

static void set_reason(slot *s, PyObject *reason)
{
    PyObject *old = s->reason;

    s->reason = reason;
    Py_XDECREF(old);
}

/* Map what fd opens and own the descriptor.  0, or an errno; then the descriptor stays the caller's. */
static int bind(slot *s, int fd, uint64_t my_time_ns)
{
    struct stat found;
    void *memory;

    if (fstat(fd, &found) == -1)
        return errno;
    memory = mmap(NULL, LBX_SEGMENT_SIZE, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (memory == MAP_FAILED)
        return errno;
    slot_drop(s);
    s->fd = fd;
    s->seg = memory;
    s->my_time_ns = my_time_ns;
    s->dev = found.st_dev;
    s->ino = found.st_ino;
    set_reason(s, NULL);
    return 0;
}

static int closed(const slot *s)
{
    /* Read anew each time: an adopter says "no snapshot" under its own epoch before it opens what its forerunner closed. */
    return s->seg != NULL && s->have && s->words.kv_total_pages == 0 && lbx_load(&s->seg->header.state) == LBX_STATE_CLOSED;
}

/* As closed(), by what stands there now: it was closed and its name taken away since the last look. */
static int says_closed(const slot *s)
{
    lbx_words w;
    uint64_t seq;

    return lbx_load_acquire(&s->seg->header.state) == LBX_STATE_CLOSED && lbx_read(s->seg, &seq, &w) && w.kv_total_pages == 0;
}

/* Its last owner is gone, as far as is known.  If the file was renamed or linked, it still has a name, and the next owner another file. */
static int ended(const slot *s) { return s->lost || closed(s); }

/* Does fd lead to the file that is mapped? */
static int mapped(const slot *s, int fd)
{
    struct stat found;

    return s->seg != NULL && fstat(fd, &found) == 0 && found.st_dev == s->dev && found.st_ino == s->ino;
}

/* Does the directory's word do?  It tells of names, not of a descriptor or a size: not for too long. */
static int unchanged(const slot *s, int64_t now, uint64_t generation)
{
    if (now >= s->full_check_ns)
        return 0;
    if (s->seg != NULL && !ended(s))
        return s->file_seen == generation;
    return (s->seg != NULL || s->nameless) && s->name_seen == generation;
}

/* Is the mapped file still there and whole, and does its owner live?  If not, look by name.  Changed?  -1: exception. */
static int check(slot *s, uint64_t generation, PyObject *owner, Py_ssize_t rank)
{
    PyObject *found, *reason;
    struct stat now;
    unsigned long long my_time_ns;
    int fd, error, named = 0;

    if (s->seg != NULL) {
        if (fstat(s->fd, &now) == -1 || now.st_dev != s->dev || now.st_ino != s->ino) {
            s->fd = -1; /* closed by another part of this program, and perhaps given to another file: not ours to close */
            slot_drop(s);
        } else if (now.st_size < LBX_SEGMENT_SIZE) {
            slot_drop(s);
        } else if (now.st_nlink > 0) {
            s->file_seen = generation;
            if (!ended(s))
                return 0;
            named = 1;
        }
    }
    /* Python code runs here: another thread may read this slot meanwhile, or close it. */
    found = PyObject_CallMethod(owner, "_find", "n", rank);
    if (found == NULL)
        return -1;
    if (!PyArg_ParseTuple(found, "iOK", &fd, &reason, &my_time_ns)) {
        Py_DECREF(found);
        return -1;
    }
    s->file_seen = s->name_seen = generation;
    s->nameless = fd == NO_NAME;
    if (fd >= 0 ? mapped(s, fd) : named && s->seg != NULL) { /* nobody has taken its place */
        Py_DECREF(found);
        if (fd >= 0)
            close(fd);
        return 0;
    }
    if (fd >= 0) {
        error = bind(s, fd, my_time_ns);
        if (error == 0) {
            Py_DECREF(found);
            return 1;
        }
        close(fd);
        reason = PyUnicode_FromFormat("it cannot be mapped: %s", strerror(error));
        if (reason == NULL) {
            Py_DECREF(found);
            return -1;
        }
    } else if (reason == Py_None && s->seg != NULL && says_closed(s)) {
        Py_DECREF(found);
        return 0; /* its owner closed it and took the name away: that stays what is known */
    } else {
        reason = reason == Py_None ? NULL : Py_NewRef(reason);
    }
    slot_drop(s);
    set_reason(s, reason);
    Py_DECREF(found);
    return 1;
}

static int accept_record(slot *s, uint64_t seq, const lbx_words *w, int64_t now)
{
    PyObject *reason = NULL;
    int new_life = !s->have || w->epoch != s->words.epoch;
    uint64_t writers;

    if (new_life)
        forget_owner(s);
    if (new_life || s->words.kv_total_pages == 0) {
        /* The header is written before the first publish of a life, so what is read now belongs to this record. */
        writers = lbx_load(&s->seg->header.time_ns_inode);
        s->same_clock = writers != 0 && writers == s->my_time_ns;
        s->dp_size = lbx_load(&s->seg->header.dp_size);
    }
    /* The same publish under another number: a writer is in the middle of its next one, or an adopter has repaired a dead one's.
     * Neither makes it younger, and the repair is no sign of this life. */
    if (new_life || w->published_ns != s->words.published_ns) {
        if (s->same_clock && (w->published_ns <= now || w->published_ns <= clock_ns(CLOCK_MONOTONIC)))
            s->bound_ns = w->published_ns;
        else
            s->bound_ns = s->last_look_ns; /* -1 at first sight */
    }
    s->have = 1;
    s->seq = seq;
    s->words = *w;
    s->first_seen_ns = s->last_look_ns = now;
    s->odd = !lbx_words_valid(w);
    if (s->odd) {
        reason = PyUnicode_FromFormat("its record is none that a writer publishes (%lld, %lld, %lld, %lld, %lld, %lld)",
                                      (long long)w->num_running, (long long)w->num_waiting, (long long)w->kv_active_pages,
                                      (long long)w->kv_total_pages, (long long)w->published_ns, (long long)w->epoch);
        if (reason == NULL)
            return -1;
    }
    if (s->reason != NULL || reason != NULL)
        set_reason(s, reason);
    return 1;
}

int slot_look(slot *s, int64_t now, int64_t interval_ns, watch *w, PyObject *owner, Py_ssize_t rank)
{
    lbx_words words;
    uint64_t seq, generation;
    int changed = 0;

    if (now >= s->next_check_ns) {
        s->next_check_ns = interval_ns == 0 ? 0 : now + interval_ns - (s->next_check_ns ? 0 : s->phase_ns);
        generation = w != NULL ? watch_generation(w) : 0;
        if (w == NULL || !unchanged(s, now, generation)) {
            s->full_check_ns = full_check_at(now, interval_ns, s->phase_ns);
            changed = check(s, generation, owner, rank);
            if (changed < 0)
                return -1;
        }
    }
    if (s->seg == NULL)
        return changed;
    if (s->have && lbx_load_acquire(&s->seg->seq) == s->seq) {
        s->last_look_ns = now;
        return changed;
    }
    if (!lbx_read(s->seg, &seq, &words))
        return changed;
    return accept_record(s, seq, &words, now);
}

static int ask(slot *s, int64_t now)
{
    int alive = lbx_owner_alive(s->fd, s->words.epoch), error;
    PyObject *reason;

    s->asked_ns = now - (s->asked_ns == LONG_AGO ? s->phase_ns : 0);
    if (alive <= 0 && !s->lost) {
        error = errno;
        if (!mapped(s, s->fd)) { /* another file was asked: no death; the next check opens anew */
            s->full_check_ns = 0;
            error = EBADF;
            alive = -1;
        }
        errno = error;
    }
    if (alive < 0) {
        reason = PyUnicode_FromFormat("its owner's lock cannot be asked for: %s", strerror(errno));
        if (reason == NULL)
            return -1;
        s->unasked = 1;
        set_reason(s, reason);
        return 0;
    }
    if (s->unasked) {
        s->unasked = 0;
        set_reason(s, NULL);
    }
    s->lost = !alive;
    if (alive)
        s->owner_seen_ns = s->asked_ns;
    return 0;
}

int slot_state(slot *s, int64_t now, int64_t interval_ns, int64_t stall_ns)
{
    int64_t proof_ns, asked_ns, since_ns;

    if (s->seg == NULL)
        return s->reason != NULL ? REFUSED : ABSENT;
    if (s->odd)
        return REFUSED;
    if (!s->have)
        return SILENT;
    if (closed(s))
        return CLOSED;
    proof_ns = s->owner_seen_ns;
    if (s->bound_ns >= 0 && s->bound_ns > proof_ns)
        proof_ns = s->bound_ns;
    asked_ns = proof_ns > s->asked_ns ? proof_ns : s->asked_ns;
    if (now - asked_ns >= interval_ns && ask(s, now) < 0)
        return -1;
    if (s->unasked)
        return REFUSED;
    if (s->lost && s->asked_ns >= proof_ns)
        return DEAD;
    if (s->words.kv_total_pages == 0)
        return SILENT;
    if ((s->seq & 1) && now - s->first_seen_ns > stall_ns)
        return STALLED; /* stopped in the middle of a publish */
    since_ns = s->bound_ns >= 0 ? s->bound_ns : s->first_seen_ns;
    if ((s->words.num_running | s->words.num_waiting) != 0 && now - since_ns > stall_ns)
        return STALLED;
    return LIVE;
}

static void earlier(int64_t *than, int64_t ns)
{
    if (ns < *than)
        *than = ns;
}

/* The row of the array, and until when it needs no other look than one at the sequence. */
int slot_row(slot *s, int64_t now, int64_t interval_ns, int64_t stall_ns, Py_ssize_t rank)
{
    int state = slot_state(s, now, interval_ns, stall_ns);
    int64_t asked_ns;

    if (state < 0)
        return -1;
    s->row.words = s->words;
    s->row.rank = (int32_t)rank;
    s->row.state = (int8_t)state;
    s->row.usable = state == LIVE || state == STALLED;
    if (!s->row.usable)
        s->row.words.num_running = s->row.words.num_waiting = s->row.words.kv_active_pages = s->row.words.kv_total_pages = 0;
    s->quiet_until_ns = 0;
    if (state == LIVE || state == STALLED || state == DEAD) {
        asked_ns = s->asked_ns > s->owner_seen_ns ? s->asked_ns : s->owner_seen_ns;
        if (s->bound_ns > asked_ns)
            asked_ns = s->bound_ns;
        s->quiet_until_ns = s->next_check_ns;
        earlier(&s->quiet_until_ns, asked_ns + interval_ns);
        if (state == LIVE && (s->seq & 1)) /* LIVE becomes STALLED by mere time */
            earlier(&s->quiet_until_ns, s->first_seen_ns + stall_ns);
        if (state == LIVE && (s->words.num_running | s->words.num_waiting) != 0)
            earlier(&s->quiet_until_ns, (s->bound_ns >= 0 ? s->bound_ns : s->first_seen_ns) + stall_ns);
    }
    return 0;
}

int64_t slot_age(const slot *s, int64_t now)
{
    if (s->seg == NULL || s->odd || s->words.kv_total_pages == 0 || s->bound_ns < 0)
        return -1;
    return now > s->bound_ns ? now - s->bound_ns : 0;
}
