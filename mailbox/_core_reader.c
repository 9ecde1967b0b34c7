/* The reader of one rank.  Load-only, on a read-only mapping. */
#include "_core.h"

typedef struct {
    PyObject_HEAD
    slot slot;
    PyObject *cached; /* the LoadSnapshot of the slot's record: handed out again while that stands */
    int64_t stall_ns, interval_ns;
    int open;
    PyObject *weakrefs;
} reader;

static int look(reader *self, int64_t now)
{
    int changed;

    if (!need_open(self->open))
        return -1;
    changed = slot_look(&self->slot, now, self->interval_ns, NULL, (PyObject *)self, 0);
    if (changed > 0)
        Py_CLEAR(self->cached);
    if (!self->open) /* closed by another thread while Python code ran, and perhaps attached anew since */
        slot_drop(&self->slot);
    return changed < 0 || !need_open(self->open) ? -1 : 0;
}

/* LoadSnapshot(*words[:4]): a tuple of a subclass has the layout of a tuple. */
static PyObject *make_snapshot(const lbx_words *w)
{
    const int64_t v[4] = {w->num_running, w->num_waiting, w->kv_active_pages, w->kv_total_pages};
    PyObject *snapshot = core.snapshot->tp_alloc(core.snapshot, 4);
    PyObject *number;
    int i;

    for (i = 0; snapshot != NULL && i < 4; i++) {
        number = PyLong_FromLongLong(v[i]);
        if (number == NULL)
            Py_CLEAR(snapshot);
        else
            PyTuple_SET_ITEM(snapshot, i, number);
    }
    return snapshot;
}

static PyObject *read_slowly(reader *self, int64_t now)
{
    if (now + core.tick_ns >= self->slot.next_check_ns)
        now = clock_ns(CLOCK_MONOTONIC);
    if (look(self, now) < 0)
        return NULL;
    if (!slot_has_snapshot(&self->slot))
        Py_RETURN_NONE;
    if (self->cached == NULL) {
        self->cached = make_snapshot(&self->slot.words);
        if (self->cached == NULL)
            return NULL;
    }
    return Py_NewRef(self->cached);
}

PyDoc_STRVAR(read_doc,
"read($self, /)\n--\n\n"
"Give the last whole snapshot of a rank that is LIVE, STALLED or DEAD (last words), else None; never waits.");

static PyObject *reader_read(reader *self, PyObject *unused)
{
    PyObject *result;
    slot *s = &self->slot;
    int64_t now = clock_ns(CLOCK_MONOTONIC_COARSE); /* a quarter of the price; behind by a tick at most */

    (void)unused;
    Py_BEGIN_CRITICAL_SECTION(self);
    if (self->cached != NULL && s->seg != NULL && now + core.tick_ns < s->next_check_ns && lbx_load_acquire(&s->seg->seq) == s->seq) {
        s->last_look_ns = now;
        result = Py_NewRef(self->cached);
    } else {
        result = read_slowly(self, now);
    }
    Py_END_CRITICAL_SECTION();
    return result;
}

PyDoc_STRVAR(state_doc,
"state($self, /)\n--\n\n"
"Say what is known of the rank now; DEAD is told within ``liveness_interval`` of the owner's end.");

static PyObject *reader_state(reader *self, PyObject *unused)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC);
    int state = -1;

    (void)unused;
    Py_BEGIN_CRITICAL_SECTION(self);
    if (look(self, now) == 0)
        state = slot_state(&self->slot, now, self->interval_ns, self->stall_ns);
    if (self->slot.unasked) /* REFUSED: nothing of it is handed out again */
        Py_CLEAR(self->cached);
    Py_END_CRITICAL_SECTION();
    return state < 0 ? NULL : Py_NewRef(core.states[state]);
}

PyDoc_STRVAR(age_doc,
"age($self, /)\n--\n\n"
"Seconds since the snapshot was published, never negative; None if there is none or its time is not known.\n\n"
"Where the writer's clock is another one (time namespace), an upper bound: since the last look that saw the old snapshot.");

static PyObject *reader_age(reader *self, PyObject *unused)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC), age = -1;
    int failed;

    (void)unused;
    Py_BEGIN_CRITICAL_SECTION(self);
    failed = look(self, now) < 0;
    if (!failed)
        age = slot_age(&self->slot, now);
    Py_END_CRITICAL_SECTION();
    if (failed)
        return NULL;
    if (age < 0)
        Py_RETURN_NONE;
    return PyFloat_FromDouble((double)age / 1e9);
}

static PyObject *reader_epoch(reader *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->slot.words.epoch);
}

static PyObject *reader_reason(reader *self, void *unused)
{
    (void)unused;
    return slot_reason(&self->slot);
}

PyDoc_STRVAR(reader_setup_doc, "_setup($self, stall_ns, interval_ns, /)\n--\n\nStart with nothing attached.");

static PyObject *reader_setup(reader *self, PyObject *args)
{
    long long stall_ns, interval_ns;

    if (!PyArg_ParseTuple(args, "LL", &stall_ns, &interval_ns))
        return NULL;
    slot_drop(&self->slot);
    self->stall_ns = stall_ns;
    self->interval_ns = interval_ns;
    self->open = 1;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(reader_close_doc,
"close($self, /)\n--\n\nLet go of the mapping.  Idempotent; snapshots already read stay good.");

static PyObject *reader_close(reader *self, PyObject *unused)
{
    (void)unused;
    Py_BEGIN_CRITICAL_SECTION(self);
    self->open = 0;
    Py_CLEAR(self->cached);
    slot_drop(&self->slot);
    Py_END_CRITICAL_SECTION();
    Py_RETURN_NONE;
}

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    reader *self = (reader *)type->tp_alloc(type, 0);

    (void)args;
    (void)kwargs;
    if (self != NULL)
        slot_init(&self->slot, 0);
    return (PyObject *)self;
}

static void reader_dealloc(reader *self)
{
    if (self->weakrefs != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    Py_CLEAR(self->cached);
    slot_drop(&self->slot);
    Py_CLEAR(self->slot.reason);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef reader_methods[];

static PyObject *reader_init_subclass(PyTypeObject *type, PyObject *unused)
{
    (void)unused;
    return own_methods(type, reader_methods);
}

static PyMethodDef reader_methods[] = {
    {"__init_subclass__", (PyCFunction)reader_init_subclass, METH_NOARGS | METH_CLASS, NULL},
    {"read", (PyCFunction)reader_read, METH_NOARGS, read_doc},
    {"state", (PyCFunction)reader_state, METH_NOARGS, state_doc},
    {"age", (PyCFunction)reader_age, METH_NOARGS, age_doc},
    {"close", (PyCFunction)reader_close, METH_NOARGS, reader_close_doc},
    {"_setup", (PyCFunction)reader_setup, METH_VARARGS, reader_setup_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reader_getset[] = {
    {"epoch", (getter)reader_epoch, NULL, "The epoch of the last look, 0 if none: another number is another life of the writer.",
     NULL},
    {"reason", (getter)reader_reason, NULL, "Why the rank was REFUSED at the last look, in words; None otherwise.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject reader_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "loadbox.mailbox._seqlock_c.ReaderCore",
    .tp_doc = "The memory side of a reader of one rank; see ``MailboxReader``.",
    .tp_basicsize = sizeof(reader),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_weaklistoffset = offsetof(reader, weakrefs),
    .tp_new = reader_new,
    .tp_dealloc = (destructor)reader_dealloc,
    .tp_methods = reader_methods,
    .tp_getset = reader_getset,
};
