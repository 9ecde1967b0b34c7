/* The scheduler's end.  Between the stores of a publish nothing runs but this C code: no Python, no allocation, no signal handler. */
#include "_core.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const why_not[] = {
    "it was never opened",
    "it is not open yet",
    "it is open already",
    "it is closed",
    "this process was forked from its owner, which alone may publish",
};

typedef struct {
    PyObject_HEAD
    owner owner;
    lbx_segment *seg;
    uint64_t epoch;
    PyObject *weakrefs;
} writer;

/* ---- publish ------------------------------------------------------------------------------------------------------------ */

/* A plain int, or -1: counts and pages nearly always fit one digit, which needs no call. */
static inline int64_t plain_int(PyObject *arg)
{
    int overflow;
    int64_t v;

    if (!PyLong_CheckExact(arg))
        return -1;
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)arg))
        return PyUnstable_Long_CompactValue((PyLongObject *)arg);
#else
    if (Py_SIZE(arg) == 1)
        return ((PyLongObject *)arg)->ob_digit[0];
    if (Py_SIZE(arg) == 0)
        return 0;
#endif
    v = PyLong_AsLongLongAndOverflow(arg, &overflow);
    return overflow ? -1 : v;
}

/* Four plain ints in range: the way of every iteration.  0: anything else, for the slow way to judge. */
static inline int fast_load(PyObject *const *args, lbx_words *w)
{
    int64_t v[4];
    int i;

    for (i = 0; i < 4; i++)
        v[i] = plain_int(args[i]);
    if ((v[0] | v[1] | v[2] | v[3]) < 0 || (v[2] > v[3] && v[3] > 0))
        return 0;
    w->num_running = v[0];
    w->num_waiting = v[1];
    w->kv_active_pages = v[2];
    w->kv_total_pages = v[3];
    return 1;
}

static int slow_load(PyObject *const *args, lbx_words *w)
{
    PyObject *load = PyObject_Vectorcall(core.check_load, args, 4, NULL);
    long long v[4];
    int ok;

    if (load == NULL)
        return 0;
    ok = PyArg_ParseTuple(load, "LLLL", &v[0], &v[1], &v[2], &v[3]);
    Py_DECREF(load);
    if (ok) {
        w->num_running = v[0];
        w->num_waiting = v[1];
        w->kv_active_pages = v[2];
        w->kv_total_pages = v[3];
    }
    return ok;
}

static void store(writer *self, lbx_words *w)
{
    w->published_ns = clock_ns(CLOCK_MONOTONIC);
    w->epoch = self->epoch;
    lbx_publish(self->seg, w);
}

PyDoc_STRVAR(publish_doc,
"publish($self, num_running, num_waiting, kv_active_pages, kv_total_pages, /)\n--\n\n"
"Publish one iteration's load; returns None.\n\n"
"Four ints, counts of requests and of pages, 0 to 2**63 - 1, active pages not above the total; ``kv_total_pages`` 0 means\n"
"\"no snapshot\".  Anything with ``__index__`` but bool is taken.  TypeError or ValueError before memory is touched: the old\n"
"value stays.  MailboxError after ``close`` and in a forked child.  Never waits for a reader.");

static PyObject *publish(writer *self, PyObject *const *args, Py_ssize_t n)
{
    lbx_words w;
    int status;

    if (n != 4)
        return PyErr_Format(PyExc_TypeError,
                            "publish() takes num_running, num_waiting, kv_active_pages and kv_total_pages, %zd given", n);
    if (!fast_load(args, &w) && !slow_load(args, &w))
        return NULL;
    Py_BEGIN_CRITICAL_SECTION(self);
    status = self->owner.status; /* asked after the conversion, whose __index__ may have closed us */
    if (status == OPEN)
        store(self, &w);
    Py_END_CRITICAL_SECTION();
    if (status != OPEN)
        return PyErr_Format(core.mailbox_error, "cannot publish to this mailbox: %s", why_not[status]);
    Py_RETURN_NONE;
}

/* How many there are in it.  Schedulers keep requests in lists and deques.  A deque's own length is taken, whatever a subclass makes
 * of it: a queue with a __len__ in Python is what this is for.  -1: exception. */
static Py_ssize_t length_of(PyObject *some)
{
    return PyObject_TypeCheck(some, core.deque) ? core.deque->tp_as_sequence->sq_length(some) : PyObject_Size(some);
}

PyDoc_STRVAR(publish_lengths_doc,
"_publish_lengths($self, running, waiting, more_waiting, kv_active_pages, kv_total_pages, /)\n--\n\n"
"``publish`` given the requests themselves: how many run, and how many there are in ``waiting`` and ``more_waiting``.\n\n"
"Each is anything with a length; a deque is asked for its own, also where a subclass has another ``__len__``.  Errors as of\n"
"``publish``, and those of ``len``.");

static PyObject *publish_lengths(writer *self, PyObject *const *args, Py_ssize_t n)
{
    Py_ssize_t running, waiting, more;
    PyObject *load[4], *result = NULL;

    if (n != 5)
        return PyErr_Format(PyExc_TypeError, "_publish_lengths() takes running, waiting, more_waiting, kv_active_pages and "
                            "kv_total_pages, %zd given", n);
    if ((running = length_of(args[0])) < 0 || (waiting = length_of(args[1])) < 0 || (more = length_of(args[2])) < 0)
        return NULL;
    load[0] = PyLong_FromSsize_t(running);
    load[1] = PyLong_FromSize_t((size_t)waiting + (size_t)more); /* may be more than a record holds: publish says so */
    load[2] = args[3];
    load[3] = args[4];
    if (load[0] != NULL && load[1] != NULL)
        result = publish(self, load, 4);
    Py_XDECREF(load[0]);
    Py_XDECREF(load[1]);
    return result;
}

/* ---- life --------------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(hold_doc,
"_hold($self, lock_fd, /)\n--\n\n"
"Own the descriptor that is about to be locked: a forked child closes it; -1: own none any more.");

static PyObject *hold(writer *self, PyObject *arg)
{
    int fd = (int)PyLong_AsLong(arg);

    if (fd == -1 && PyErr_Occurred())
        return NULL;
    owner_delist(&self->owner);
    if (fd >= 0) {
        self->owner.lock_fd = fd;
        owner_enlist(&self->owner);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(attach_doc, "_attach($self, map_fd, /)\n--\n\nMap ``map_fd`` for writing.");

static PyObject *attach(writer *self, PyObject *arg)
{
    int map_fd = (int)PyLong_AsLong(arg);
    void *memory;

    if (map_fd == -1 && PyErr_Occurred())
        return NULL;
    if (self->owner.status != UNOPENED || self->owner.lock_fd < 0)
        return PyErr_Format(core.mailbox_error, "this mailbox cannot be opened: %s", why_not[self->owner.status]);
    memory = mmap(NULL, LBX_SEGMENT_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, map_fd, 0);
    if (memory == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    self->seg = memory;
    self->owner.status = ATTACHED;
    Py_RETURN_NONE;
}

static int need_attached(writer *self)
{
    if (self->owner.status == ATTACHED)
        return 1;
    PyErr_Format(core.mailbox_error, "this mailbox cannot be opened: %s", why_not[self->owner.status]);
    return 0;
}

PyDoc_STRVAR(repair_doc, "_repair($self, /)\n--\n\nMake both copies whole after a writer that may have been stopped half-way.");

static PyObject *repair(writer *self, PyObject *unused)
{
    (void)unused;
    if (!need_attached(self))
        return NULL;
    lbx_repair(self->seg);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(begin_doc,
"_begin($self, epoch, rank, dp_size, pid, start_ns, boot_id, time_ns_inode, /)\n--\n\n"
"Start a life: no snapshot under the new epoch, the header, state open, and the magic last.");

static PyObject *begin(writer *self, PyObject *args)
{
    unsigned long long epoch, rank, dp_size, pid, start_ns, time_ns_inode;
    const char *boot;
    Py_ssize_t boot_size;
    uint64_t boot_words[2];
    lbx_words none = {0};
    lbx_header *h;

    if (!PyArg_ParseTuple(args, "KKKKKy#K", &epoch, &rank, &dp_size, &pid, &start_ns, &boot, &boot_size, &time_ns_inode))
        return NULL;
    if (!need_attached(self))
        return NULL;
    if (boot_size != sizeof boot_words)
        return PyErr_Format(PyExc_ValueError, "boot_id must be 16 bytes");
    memcpy(boot_words, boot, sizeof boot_words);
    h = &self->seg->header;
    self->epoch = epoch;
    store(self, &none);
    lbx_store(&h->abi_major, LBX_ABI_MAJOR);
    lbx_kill_point();
    lbx_store(&h->abi_minor, LBX_ABI_MINOR);
    lbx_store(&h->kind, LBX_KIND_RANK);
    lbx_store(&h->record_offset, LBX_RECORD_OFFSET);
    lbx_kill_point();
    lbx_store(&h->rank, rank);
    lbx_store(&h->dp_size, dp_size);
    lbx_store(&h->owner_pid, pid);
    lbx_store(&h->start_ns, start_ns);
    lbx_kill_point();
    lbx_store(&h->boot_id[0], boot_words[0]);
    lbx_store(&h->boot_id[1], boot_words[1]);
    lbx_store(&h->time_ns_inode, time_ns_inode);
    lbx_store(&h->capacity, 0);
    lbx_store(&h->epoch, 0);
    lbx_kill_point();
    lbx_store_release(&h->state, LBX_STATE_OPEN);
    lbx_kill_point();
    lbx_store_release(&h->magic, LBX_MAGIC);
    lbx_kill_point();
    self->owner.status = OPEN;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(finish_doc,
"_finish($self, /)\n--\n\n"
"End the life: no snapshot, state closed.  Gives the lock's descriptor; -1 if there is nothing to end (any more).");

static PyObject *finish(writer *self, PyObject *unused)
{
    lbx_words none = {0};
    int fd = -1;

    (void)unused;
    Py_BEGIN_CRITICAL_SECTION(self);
    if (self->owner.status == OPEN) {
        self->owner.status = FINISHED;
        store(self, &none);
        lbx_store_release(&self->seg->header.state, LBX_STATE_CLOSED);
        lbx_kill_point();
        fd = self->owner.lock_fd;
    }
    Py_END_CRITICAL_SECTION();
    return PyLong_FromLong(fd);
}

static void let_go(writer *self)
{
    int fd = owner_delist(&self->owner);

    if (self->seg != NULL)
        munmap(self->seg, LBX_SEGMENT_SIZE);
    self->seg = NULL;
    if (fd >= 0)
        close(fd);
    if (self->owner.status < FINISHED)
        self->owner.status = FINISHED;
}

PyDoc_STRVAR(detach_doc, "_detach($self, /)\n--\n\nUnmap, and close the lock's descriptor, if it is still ours.");

static PyObject *detach(writer *self, PyObject *unused)
{
    (void)unused;
    Py_BEGIN_CRITICAL_SECTION(self);
    let_go(self);
    Py_END_CRITICAL_SECTION();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(owns_doc, "_owns($self, /)\n--\n\nIs this an open owner?");

static PyObject *owns(writer *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(self->owner.status == OPEN);
}

PyDoc_STRVAR(seen_doc,
"_seen($self, /)\n--\n\n"
"The record as its owner sees it: (sequence, the four numbers); None if this is no open owner.  No system call.");

static PyObject *seen(writer *self, PyObject *unused)
{
    lbx_words w = {0};
    uint64_t seq = 0;
    int open;

    (void)unused;
    Py_BEGIN_CRITICAL_SECTION(self);
    open = self->owner.status == OPEN;
    if (open) {
        seq = lbx_load(&self->seg->seq);
        lbx_words_load(&w, &self->seg->a); /* nobody else writes: both copies are whole and the same */
    }
    Py_END_CRITICAL_SECTION();
    if (!open)
        Py_RETURN_NONE;
    return Py_BuildValue("KKKKK", (unsigned long long)seq, (unsigned long long)w.num_running, (unsigned long long)w.num_waiting,
                         (unsigned long long)w.kv_active_pages, (unsigned long long)w.kv_total_pages);
}

PyDoc_STRVAR(removed_doc, "_removed($self, /)\n--\n\nIs this an open owner of a segment that no name leads to any more?");

static PyObject *removed(writer *self, PyObject *unused)
{
    struct stat file;
    int gone;

    (void)unused;
    Py_BEGIN_CRITICAL_SECTION(self);
    gone = self->owner.status == OPEN && fstat(self->owner.lock_fd, &file) == 0 && file.st_nlink == 0;
    Py_END_CRITICAL_SECTION();
    return PyBool_FromLong(gone);
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    writer *self = (writer *)type->tp_alloc(type, 0);

    (void)args;
    (void)kwargs;
    if (self != NULL)
        self->owner.lock_fd = -1;
    return (PyObject *)self;
}

static void writer_dealloc(writer *self)
{
    if (self->weakrefs != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    let_go(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[];

static PyObject *init_subclass(PyTypeObject *type, PyObject *unused)
{
    (void)unused;
    return own_methods(type, methods);
}

static PyMethodDef methods[] = {
    {"__init_subclass__", (PyCFunction)init_subclass, METH_NOARGS | METH_CLASS, NULL},
    {"publish", (PyCFunction)(void (*)(void))publish, METH_FASTCALL, publish_doc},
    {"_publish_lengths", (PyCFunction)(void (*)(void))publish_lengths, METH_FASTCALL, publish_lengths_doc},
    {"_hold", (PyCFunction)hold, METH_O, hold_doc},
    {"_attach", (PyCFunction)attach, METH_O, attach_doc},
    {"_repair", (PyCFunction)repair, METH_NOARGS, repair_doc},
    {"_begin", (PyCFunction)begin, METH_VARARGS, begin_doc},
    {"_finish", (PyCFunction)finish, METH_NOARGS, finish_doc},
    {"_detach", (PyCFunction)detach, METH_NOARGS, detach_doc},
    {"_owns", (PyCFunction)owns, METH_NOARGS, owns_doc},
    {"_seen", (PyCFunction)seen, METH_NOARGS, seen_doc},
    {"_removed", (PyCFunction)removed, METH_NOARGS, removed_doc},
    {NULL, NULL, 0, NULL},
};

PyTypeObject writer_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "loadbox.mailbox._seqlock_c.WriterCore",
    .tp_doc = "The memory side of a writer; see ``MailboxWriter``.",
    .tp_basicsize = sizeof(writer),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_weaklistoffset = offsetof(writer, weakrefs),
    .tp_new = writer_new,
    .tp_dealloc = (destructor)writer_dealloc,
    .tp_methods = methods,
};
