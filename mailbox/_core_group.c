/* The reader of a whole group.  Load-only, on read-only mappings. */
#include "_core.h"

enum { CHUNK = 64, RANK_LIMIT = 65536 };

typedef struct {
    PyObject_HEAD
    slot **chunks; /* of CHUNK each, never moved: another thread may grow the list while this one runs Python code for a slot */
    Py_ssize_t size, announced; /* ranks that have a row, and the largest dp_size that a header gave */
    int64_t stall_ns, interval_ns, next_discovery_ns, full_discovery_ns;
    uint64_t discovered; /* the directory's generation then */
    watch names;
    int open, discovers;
    PyObject *out; /* the last array that was given and found right, to be checked once */
    row *out_rows;
    Py_ssize_t out_size;
    PyObject *weakrefs;
} group;

static slot *slot_of(group *self, Py_ssize_t rank) { return &self->chunks[rank / CHUNK][rank % CHUNK]; }

static int grow(group *self, Py_ssize_t size)
{
    slot **chunks, *chunk;

    while (self->size < size) {
        if (self->size % CHUNK == 0) {
            chunks = PyMem_Realloc(self->chunks, (size_t)(self->size / CHUNK + 1) * sizeof *chunks);
            if (chunks != NULL)
                self->chunks = chunks;
            chunk = chunks != NULL ? PyMem_Malloc(CHUNK * sizeof *chunk) : NULL;
            if (chunk == NULL) {
                PyErr_NoMemory();
                return -1;
            }
            chunks[self->size / CHUNK] = chunk;
        }
        slot_init(slot_of(self, self->size), self->interval_ns / CHUNK * (self->size % CHUNK));
        self->size++;
    }
    return 0;
}

static int discover(group *self, int64_t now)
{
    uint64_t generation = watch_generation(&self->names);
    PyObject *found;
    Py_ssize_t size;

    self->next_discovery_ns = now + self->interval_ns;
    if (generation == self->discovered && now < self->full_discovery_ns)
        return 0;
    self->discovered = 0;
    found = PyObject_CallMethod((PyObject *)self, "_discover", NULL);
    if (found == NULL)
        return -1;
    self->full_discovery_ns = full_check_at(now, self->interval_ns, 0);
    self->discovered = generation;
    size = PyLong_AsSsize_t(found);
    Py_DECREF(found);
    if (size == -1 && PyErr_Occurred())
        return -1;
    return grow(self, size);
}

/* Check an array that was not given last time and remember it. */
static int take_out(group *self, PyObject *out)
{
    PyObject *checked = PyObject_CallMethod((PyObject *)self, "_check_out", "On", out, self->size);
    Py_buffer view;

    if (checked == NULL)
        return -1;
    Py_DECREF(checked);
    if (PyObject_GetBuffer(out, &view, PyBUF_WRITABLE) == -1)
        return -1;
    Py_INCREF(out);
    Py_XSETREF(self->out, out);
    self->out_rows = view.buf;
    self->out_size = view.len / (Py_ssize_t)sizeof(row);
    PyBuffer_Release(&view); /* the array stays alive by our reference, and with it its memory */
    return 0;
}

static void absent_row(row *r, Py_ssize_t rank)
{
    memset(r, 0, sizeof *r);
    r->rank = (int32_t)rank;
}

static int fill_row(group *self, row *to, Py_ssize_t rank, int64_t now)
{
    slot *s = slot_of(self, rank);
    int changed;

    if (s->seg != NULL && now < s->quiet_until_ns && lbx_load_acquire(&s->seg->seq) == s->seq) {
        s->last_look_ns = now;
    } else {
        changed = slot_look(s, now, self->interval_ns, &self->names, (PyObject *)self, rank);
        if (!self->open) /* closed by another thread while Python code ran, and perhaps attached anew since */
            slot_drop(s);
        if (changed < 0 || !need_open(self->open))
            return -1;
        if (slot_row(s, now, self->interval_ns, self->stall_ns, rank) < 0)
            return -1;
        if (s->dp_size <= RANK_LIMIT && (Py_ssize_t)s->dp_size > self->announced)
            self->announced = (Py_ssize_t)s->dp_size;
    }
    *to = s->row;
    return 0;
}

/* Fill `out`, or an array of the group's size if it is None, for the ranks known so far; new reference. */
static PyObject *fill_rows(group *self, PyObject *out, int64_t now)
{
    Py_ssize_t rank, size = self->size, rows_size;
    PyObject *made = NULL;
    row *rows;

    if (out == Py_None) {
        made = out = PyObject_CallMethod((PyObject *)self, "_rows", "n", size);
        if (made == NULL)
            return NULL;
    }
    if ((out != self->out || self->out_size < size) && take_out(self, out) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    if (made == NULL)
        Py_INCREF(out);
    rows = self->out_rows; /* locals from here on: another thread may give another array while Python code runs below */
    rows_size = self->out_size;
    if (made != NULL)
        Py_CLEAR(self->out); /* nobody asked for this one to be kept */
    for (rank = 0; rank < size; rank++)
        if (fill_row(self, &rows[rank], rank, now) < 0) {
            Py_DECREF(out);
            return NULL;
        }
    for (; rank < rows_size; rank++)
        absent_row(&rows[rank], rank);
    return out;
}

static PyObject *read_rows(group *self, PyObject *out)
{
    int64_t now = clock_ns(CLOCK_MONOTONIC);
    PyObject *result;

    if (!need_open(self->open))
        return NULL;
    self->names.asked = 0;
    if (self->discovers && now >= self->next_discovery_ns && discover(self, now) < 0)
        return NULL;
    result = fill_rows(self, out, now);
    while (result != NULL && self->discovers && self->announced > self->size) { /* a rank told of more ranks */
        Py_DECREF(result);
        result = grow(self, self->announced) < 0 ? NULL : fill_rows(self, out, now);
    }
    return result;
}

PyDoc_STRVAR(group_read_doc,
"read($self, /, out=None)\n--\n\n"
"Read all ranks at once; row i is rank i.  Give ``out``, an array that was returned before, to allocate nothing.\n\n"
"Unusable rows hold four zeros, and ``state`` says why.  Rows of ``out`` past the group's size are ABSENT.  ValueError if\n"
"``out`` is too short (the group has grown) or read-only, TypeError if it is no array of these rows.");

static PyObject *group_read(group *self, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    Py_ssize_t named = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    PyObject *result;

    if (n + named > 1)
        return PyErr_Format(PyExc_TypeError, "read() takes one argument, out, %zd given", n + named);
    if (named && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "out") != 0)
        return PyErr_Format(PyExc_TypeError, "read() takes one argument, out, not %R", PyTuple_GET_ITEM(names, 0));
    Py_BEGIN_CRITICAL_SECTION(self);
    result = read_rows(self, n + named ? args[0] : Py_None);
    Py_END_CRITICAL_SECTION();
    return result;
}

PyDoc_STRVAR(group_reason_doc,
"reason($self, rank, /)\n--\n\nWhy ``rank`` was REFUSED at the last read, in words; None otherwise.");

static PyObject *group_reason(group *self, PyObject *arg)
{
    Py_ssize_t rank = PyNumber_AsSsize_t(arg, PyExc_IndexError);

    if (rank == -1 && PyErr_Occurred())
        return NULL;
    if (rank < 0 || rank >= self->size)
        return PyErr_Format(PyExc_IndexError, "rank %zd is not among the %zd known", rank, self->size);
    return slot_reason(slot_of(self, rank));
}

static Py_ssize_t group_length(group *self) { return self->size; }

PyDoc_STRVAR(group_setup_doc,
"_setup($self, size, stall_ns, interval_ns, discovers, /)\n--\n\n"
"Start with ``size`` ranks, nothing attached; ``discovers``: ask ``_discover`` for more.");

static PyObject *group_setup(group *self, PyObject *args)
{
    long long stall_ns, interval_ns;
    Py_ssize_t size;
    int discovers;

    if (!PyArg_ParseTuple(args, "nLLp", &size, &stall_ns, &interval_ns, &discovers))
        return NULL;
    self->stall_ns = stall_ns;
    self->interval_ns = interval_ns;
    self->discovers = discovers;
    if (grow(self, size) < 0)
        return NULL;
    self->open = 1;
    Py_RETURN_NONE;
}

static void drop_all(group *self)
{
    Py_ssize_t i;

    self->open = 0;
    for (i = 0; i < self->size; i++)
        slot_drop(slot_of(self, i));
    Py_CLEAR(self->out);
}

PyDoc_STRVAR(group_close_doc, "close($self, /)\n--\n\nLet go of all mappings.  Idempotent; arrays already read stay good.");

static PyObject *group_close(group *self, PyObject *unused)
{
    (void)unused;
    Py_BEGIN_CRITICAL_SECTION(self);
    drop_all(self);
    Py_END_CRITICAL_SECTION();
    Py_RETURN_NONE;
}

static void group_dealloc(group *self)
{
    Py_ssize_t i;

    if (self->weakrefs != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    drop_all(self);
    for (i = 0; i < self->size; i++)
        Py_CLEAR(slot_of(self, i)->reason);
    for (i = 0; i < self->size; i += CHUNK)
        PyMem_Free(self->chunks[i / CHUNK]);
    PyMem_Free(self->chunks);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef group_methods[];

static PyObject *group_init_subclass(PyTypeObject *type, PyObject *unused)
{
    (void)unused;
    return own_methods(type, group_methods);
}

static PyMethodDef group_methods[] = {
    {"__init_subclass__", (PyCFunction)group_init_subclass, METH_NOARGS | METH_CLASS, NULL},
    {"read", (PyCFunction)(void (*)(void))group_read, METH_FASTCALL | METH_KEYWORDS, group_read_doc},
    {"reason", (PyCFunction)group_reason, METH_O, group_reason_doc},
    {"close", (PyCFunction)group_close, METH_NOARGS, group_close_doc},
    {"_setup", (PyCFunction)group_setup, METH_VARARGS, group_setup_doc},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods group_sequence = {.sq_length = (lenfunc)group_length};

PyTypeObject group_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "loadbox.mailbox._seqlock_c.GroupCore",
    .tp_doc = "The memory side of a reader of all ranks; see ``GroupReader``.",
    .tp_basicsize = sizeof(group),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_weaklistoffset = offsetof(group, weakrefs),
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)group_dealloc,
    .tp_methods = group_methods,
    .tp_as_sequence = &group_sequence,
};
